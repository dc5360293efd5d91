"""When a second prefill server is started on a prompt whose first token is late, and how often. Pure.

    after = factor × (seconds queued + seconds of computing + seconds of the handoff, as forecast when it was posted)

Hedged requests: Dean and Barroso, "The Tail at Scale" (2013), who send a second one when the first is later than most,
and bound how many. The budget is that of gRPC's retry throttling (proposal A6: a bucket of tokens, each request adds a
share of one, and at half of the bucket nothing more is taken), so that servers that are all late are not given twice
the work.
"""

from headrace.core.types.requests.remote_prefill import RemoteForecast

SHARE = 0.1
"""Second servers for each prompt, in the long run."""

MOST = 10.0
"""The bucket: half of it may be taken at once after a quiet time."""

SHORTEST_S = 0.05
"""Nothing is late before: connections and threads may be."""


class Hedging:
    """Decides for one decode server. factor: how many times its forecast a first token may take."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._tokens = MOST

    def after_s(self, forecast: RemoteForecast | None) -> float | None:
        """A prompt was posted: seconds after which it is late; None where that is not known."""
        self._tokens = min(MOST, self._tokens + SHARE)
        if forecast is None:
            return None
        return max(SHORTEST_S, self._factor * (forecast.queued_s + forecast.work_s + forecast.handoff_s))

    def take(self) -> bool:
        """A prompt is late: whether a second server may be started on it."""
        if self._tokens <= MOST / 2:
            return False
        self._tokens -= 1.0
        return True
