"""What the front end counts and measures, for /metrics, and the times of one request's tokens, as clients see them."""

from collections.abc import Callable, Iterable

from headrace.core.process_usage import process_usage
from headrace.core.runtime.clock import Clock
from headrace.core.stats import TOKENS, Counters, Histograms, Sample, Stats
from headrace.core.types.requests.outcomes import End
from headrace.core.types.requests.request import Usage
from headrace.server.telemetry.catalog import E2E_SECONDS, TOKEN_SECONDS


class FrontMetrics:
    """Counters and histograms of the front end. Used by the event loop only."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._histograms = Histograms()
        self._build: tuple[str, ...] = ("", "", "")
        self._sources: tuple[Callable[[], tuple[Sample, ...]], ...] = ()

    def include(self, *sources: Callable[[], tuple[Sample, ...]]) -> None:
        """Show the samples that these return, too."""
        self._sources += sources

    def set_build(self, version: str, role: str, model: str) -> None:
        """Set the labels of build_info."""
        self._build = (version, role, model)

    def observe_request(self, route: str, status: int, duration_s: float) -> None:
        """Count one HTTP request. route: template of its path, so that there are few label values."""
        self._counters.add("http_requests_total", labels=(route, str(status)))
        self._histograms.observe("http_request_duration_seconds", duration_s, (route,))

    def count_ends(self, route: str, ends: Iterable[End]) -> None:
        """Count the ends of the prompts and choices of one HTTP request."""
        for outcome, reason in ends:
            self._counters.add("requests_total", labels=(outcome, reason, route))

    def observe_end(self, duration_s: float, usage: Usage) -> None:
        """Count the time and the tokens of a request that ended well."""
        self._histograms.observe("e2e_request_latency_seconds", duration_s, bounds=E2E_SECONDS)
        self._histograms.observe("request_prompt_tokens", usage.prompt_tokens, bounds=TOKENS)
        self._histograms.observe("request_generation_tokens", usage.completion_tokens, bounds=TOKENS)

    def observe_tokens(self, duration_s: float, tokens: int) -> None:
        """Count the time from the tokens before to these, each token with its share."""
        self._histograms.observe("inter_token_latency_seconds", duration_s / tokens, bounds=TOKEN_SECONDS, times=tokens)

    def observe_mean_token_time(self, seconds: float) -> None:
        """Count a request's mean time per token after its first one."""
        self._histograms.observe("request_time_per_output_token_seconds", seconds, bounds=TOKEN_SECONDS)

    def observe_first_token(self, duration_s: float) -> None:
        """Count the time from a request's arrival to its first token."""
        self._histograms.observe("time_to_first_token_seconds", duration_s)

    def count_retry(self, reason: str) -> None:
        """Count a prompt that goes to another prefill server. reason: why it left the one before."""
        self._counters.add("prefill_retries_total", labels=(reason,))

    def count_prefix_fetch(self, source: str, result: str, tokens: int, seconds: float) -> None:
        """Count a prefix that was fetched into the prefix cache, or was not. source: "sibling", "open" or
        "resume"."""
        self._counters.add("prefix_fetches_total", labels=(source, result))
        self._counters.add("prefix_fetched_tokens_total", tokens, labels=(source,))
        self._counters.add("prefix_fetch_seconds_total", seconds, labels=(source,))

    def count_hedge(self, result: str) -> None:
        """Count a prompt whose first token was late."""
        self._counters.add("hedges_total", labels=(result,))

    def count_return(self, result: str) -> None:
        """Count KV of a turn that was offered."""
        self._counters.add("kv_returns_total", labels=(result,))

    def count_returned(self, tokens: int, size: int, seconds: float) -> None:
        """Count KV of a turn that has gone to the prefill server, or has come."""
        self._counters.add("kv_returned_tokens_total", tokens)
        self._counters.add("kv_returned_bytes_total", size)
        self._counters.add("kv_return_seconds_total", seconds)

    def count_audit(self, result: str) -> None:
        """Count an audit of a prefill server."""
        self._counters.add("audits_total", labels=(result,))

    def count_retried_request(self, outcome: str) -> None:
        """Count the end of a request whose prompt went to more than one prefill server."""
        self._counters.add("prefill_retried_requests_total", labels=(outcome,))

    def statistics(self) -> Stats:
        """A snapshot."""
        build = Sample("build_info", 1.0, self._build)
        included = (sample for source in self._sources for sample in source())
        own = (build, *process_usage("front_end"))
        return Stats((*self._counters.snapshot(), *own, *included), self._histograms.snapshot())


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
