"""Revokes the write access of prefill stages after their session has ended, and retries until it is gone. Pure.

A stage cannot wake this process when it stops, so its access is tried at growing intervals. Most stop at once.
"""

from dataclasses import dataclass

from headrace.core.runtime.rate_limit import Backoff
from headrace.transfer.backends.base import RegisteredPool

FIRST_RETRY_S = 0.002
LAST_RETRY_S = 0.25


@dataclass(slots=True)
class _Ended:
    """An ended session and the prefill stages that may still write in it."""

    session: str
    registered: RegisteredPool
    stages: list[int]
    """Ranks of the stages that may still write."""


class Revocations:
    """Sessions whose write access is being revoked."""

    def __init__(self) -> None:
        self._ended: list[_Ended] = []
        self._backoff = Backoff(FIRST_RETRY_S, LAST_RETRY_S)
        self._next: float | None = None

    def __len__(self) -> int:
        return len(self._ended)

    def begin(self, session: str, registered: RegisteredPool, stages: list[int], now: float) -> list[str]:
        """Start revoking the access of these stages. Returns what tick() returns."""
        self._ended.append(_Ended(session, registered, stages))
        self._backoff.reset()
        return self._ask(now)

    def tick(self, now: float) -> list[str]:
        """Retry if it is time. Returns the sessions in which no stage can write any more."""
        if self._next is None or self._next > now:
            return []
        return self._ask(now)

    def next_deadline(self) -> float | None:
        """When tick() has to be called; None if nothing is being revoked."""
        return self._next

    def _ask(self, now: float) -> list[str]:
        for one in self._ended:
            one.stages = [stage for stage in one.stages if not one.registered.revoke(one.session, stage)]
        over = [one.session for one in self._ended if not one.stages]
        self._ended = [one for one in self._ended if one.stages]
        self._next = self._backoff.next(now) if self._ended else None
        return over
