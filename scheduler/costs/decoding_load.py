"""How many requests will decode while a prompt is computed: at first those that do now, later as many as on average.

    mean over D seconds = average + (now - average) · (1 - exp(-D/τ)) · τ/D      τ: mean seconds for which one decodes

The mean of an M/M/∞ queue on its way back to its average. Averages are exponential, over TAU_S; τ is the average number
over the rate at which requests end (Little's law).
"""

from math import exp, expm1

from headrace.scheduler.costs.backlog import TAU_S

WEIGHT = 1.5
"""Requests that a decoding one counts as: one that is kept for longer makes the passes of others longer, too, by the
share of a pass that grows with the number of requests."""


class DecodingLoad:
    """The requests that decode in one place: a replica, or an engine."""

    def __init__(self) -> None:
        self.requests = 0.0
        """Those that decode now."""

        self._seconds = self._request_s = self._ended = 0.0  # sums of which older parts count less
        self._at = 0.0

    def changed(self, requests: float, ended: float, now: float) -> None:
        """So many requests decode from now on; so many have ended since the last change."""
        self._advance(now)
        self.requests = requests
        self._ended += ended

    def delayed(self, seconds: float, now: float) -> float:
        """Requests that work of so many seconds keeps from decoding meanwhile, with their WEIGHT."""
        return WEIGHT * self.expected(seconds, now)

    def expected(self, seconds: float, now: float) -> float:
        """Mean number of requests that decode during so many seconds from now on."""
        self._advance(now)
        if seconds <= 0 or not self._ended or not self._request_s:
            return self.requests
        average, lifetimes = self._request_s / self._seconds, seconds * self._ended / self._request_s
        return average - (self.requests - average) * expm1(-lifetimes) / lifetimes

    def _advance(self, now: float) -> None:
        passed, self._at = max(0.0, now - self._at), max(now, self._at)
        kept = exp(-passed / TAU_S)
        self._seconds = kept * self._seconds + (1 - kept) * TAU_S
        self._request_s = kept * self._request_s + (1 - kept) * TAU_S * self.requests
        self._ended *= kept
