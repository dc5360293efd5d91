"""The times of one request's tokens, as clients see them."""

from headrace.core.runtime.clock import Clock
from headrace.core.types.requests.request import Usage
from headrace.server.telemetry.prometheus import FrontMetrics


class TokenTimes:
    """Observes the first token of a request, the time between tokens, and its end. Made when it is admitted."""

    def __init__(self, metrics: FrontMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started = self._last = clock.now()
        self._first_token_s: float | None = None

    def came(self, tokens: int) -> float | None:
        """New text with so many tokens has come. Returns the seconds to the first token with the first text, else
        None."""
        if self._first_token_s is not None and not tokens:  # the end of the text, or a part of a character
            return None
        now = self._clock.now()
        since, self._last = now - self._last, now
        if self._first_token_s is None:
            self._first_token_s = since
            self._metrics.observe_first_token(since)
            return since
        self._metrics.observe_tokens(since, tokens)
        return None

    def ended(self, usage: Usage) -> None:
        """The request has ended well."""
        duration_s = self._clock.now() - self._started
        self._metrics.observe_end(duration_s, usage)
        if self._first_token_s is not None and usage.completion_tokens > 1:
            after_first_s = duration_s - self._first_token_s
            self._metrics.observe_mean_token_time(after_first_s / (usage.completion_tokens - 1))
