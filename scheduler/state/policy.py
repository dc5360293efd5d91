"""Scheduling policies: the order in which waiting requests are started. Whether the head fits is decided elsewhere."""

import heapq
from typing import Protocol

from headrace.core.types.errors import ConfigError
from headrace.scheduler.state.record import Request


class Policy(Protocol):
    """The waiting queue. A request is in it at most once; its fields do not change while it is.

    Only the head is started: a head that does not fit waits, and no request overtakes it.
    """

    def push(self, request: Request) -> None:
        """Add a request. One that comes back after preemption has its old arrival number."""
        ...

    def head(self, now: float) -> Request | None:
        """The next to start; None when no request waits."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out: it was started, or has ended. Raises KeyError when it is not waiting."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, request: Request) -> bool: ...


class Fcfs:
    """First come, first served, by arrival at the server."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._waiting: dict[int, int] = {}  # arrival number -> entry number
        self._entries = 0

    def push(self, request: Request) -> None:
        """Add a request at the place of its arrival number."""
        self._entries += 1
        self._waiting[request.arrival] = self._entries
        heapq.heappush(self._heap, (request.arrival, self._entries, request))

    def head(self, now: float) -> Request | None:
        """The request that arrived first."""
        while self._heap:
            arrival, entry, request = self._heap[0]
            if self._waiting.get(arrival) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out. Raises KeyError when it is not waiting."""
        del self._waiting[request.arrival]

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._waiting


POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs}


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError for a name there is no policy for."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; write one of: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
