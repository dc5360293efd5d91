"""Ways of moving KV that have failed towards a peer, and are avoided for a while. Pure.

A peer whose session ended because a write was lost (an RDMA queue pair in error, a UCX endpoint that timed out) says
hello again at once. The same way would most likely fail again, with all requests of the new session: the next one that
works is taken meanwhile, and the first is tried again after a pause that grows with every failure.
"""

from typing import NamedTuple

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 3600.0
REMEMBERED = 1024


class _Failure(NamedTuple):
    in_a_row: int
    """Failures without an hour of quiet between."""
    until: float
    """When the way is tried again."""


class BackendHealth:
    """Failures by peer and backend. A way that works for LONGEST_PAUSE_S after a pause counts as well again."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], _Failure] = {}  # the oldest first

    def failed(self, peer: str, backend: str, now: float) -> None:
        """Note that payload was lost on this way to the peer of this name."""
        last = self._failures.pop((peer, backend), None)
        count = 1 if last is None or now > last.until + LONGEST_PAUSE_S else last.in_a_row + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(count - 1, 16), LONGEST_PAUSE_S)
        self._failures[peer, backend] = _Failure(count, now + pause_s)
        if len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]

    def avoided(self, peer: str, backends: tuple[str, ...], now: float) -> dict[str, str]:
        """Those of the backends that are not tried with this peer now, and why."""
        failures = {backend: self._failures.get((peer, backend)) for backend in backends}
        return {
            backend: f"it failed {failure.in_a_row} times in a row, and is tried again in {failure.until - now:.0f} s"
            for backend, failure in failures.items()
            if failure is not None and now < failure.until
        }
