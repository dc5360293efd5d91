"""Prompts that are computed and whose decode server has not acknowledged all of their KV: pages and metadata rows that
only their peer can free.

A peer that acknowledges slowly would have the whole pool after a while. Where there are peers of several owners, the
prompts of one that has more of the pool than is left wait, not computed, until it has acknowledged others (Shares):

    BOOTSTRAP ──must_wait()? no──► WAITING ─► RUNNING ─► INFLIGHT, counted by add() ─► ended, remove()
        ▲ │ yes                     │  ▲                     │
        │ ▼                         │  └──released(), counted│
        └─waiting ◄─────────────────┘◄──the owner has more than is left
"""

from collections.abc import Iterable, Iterator

from headrace.core.shares import Shares
from headrace.scheduler.peers.peer_tables import DecodePeerTable
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request


class Unacknowledged:
    """What the owners of peers keep of the pools, and the prompts that wait for them to acknowledge."""

    def __init__(self, peers: DecodePeerTable, pages: int, rows: int, page_size: int) -> None:
        """pages, rows: of the server in all. page_size: positions of a page."""
        self._peers = peers
        self._pool_pages = pages
        self._pool_rows = rows
        self._page_size = page_size
        self._pages = Shares()
        self._rows = Shares()
        self._counted: dict[int, tuple[str, int]] = {}  # by arrival number: owner and pages
        self._waiting: dict[str, dict[int, Request]] = {}  # by owner and arrival number

    @property
    def waiting(self) -> int:
        """Prompts that wait for their peer to acknowledge others."""
        return sum(map(len, self._waiting.values()))

    def add(self, request: Request) -> list[Request]:
        """Count a request that is computed and whose peer has reserved. Returns requests of the same owner that have to
        wait from now on, and are noted; they are in phase WAITING."""
        owner = self._owner(request)
        if request.lease is None or owner is None:
            return []
        self._count(request, owner)
        if owner in self._waiting or self._fits(owner, 1):
            return []
        found = [
            other
            for peer in self._peers
            if peer.owner == owner
            for other in peer.requests.values()
            if other.phase is Phase.WAITING and not other.early_prefill and other.arrival not in self._counted
        ]
        if found:
            found.sort(key=lambda other: other.arrival)
            self._waiting[owner] = {other.arrival: other for other in found}
        return found

    def remove(self, request: Request) -> None:
        """The request has ended. Does nothing for one that is not here."""
        counted = self._counted.pop(request.arrival, None)
        if counted is not None:
            owner, pages = counted
            self._pages.add(owner, -pages)
            self._rows.add(owner, -1)
        for owner, waiting in self._waiting.items():
            if waiting.pop(request.arrival, None) is not None:
                if not waiting:
                    del self._waiting[owner]
                return

    def must_wait(self, request: Request) -> bool:
        """Whether a request whose peer has reserved is not to be computed yet. It is noted if so."""
        owner = self._owner(request)
        if owner is None or (owner not in self._waiting and self._fits(owner, self._pages_of(request))):
            return False
        self._waiting.setdefault(owner, {})[request.arrival] = request
        return True

    def released(self) -> Iterator[Request]:
        """Remove and yield the requests that need not wait any more, each owner's in the order of arrival."""
        for owner in list(self._waiting):
            waiting = self._waiting[owner]
            while waiting and self._fits(owner, self._pages_of(first := next(iter(waiting.values())))):
                del waiting[first.arrival]
                self._count(first, owner)
                yield first
            if not waiting:
                self._waiting.pop(owner, None)

    def check(self, requests: Iterable[Request]) -> Iterator[str]:
        """Requests that should be counted and are not, or the other way round."""
        live = [request for request in requests if not request.ended and request.outgoing is not None]
        computed = {one.arrival for one in live if one.phase is Phase.INFLIGHT and self._owner(one) is not None}
        if not computed <= self._counted.keys() <= {one.arrival for one in live}:
            yield f"requests {set(self._counted)} count as not acknowledged; there are {computed}"
        waiting = {arrival for each in self._waiting.values() for arrival in each}
        if waiting != (expected := {one.arrival for one in live if one.phase is Phase.BOOTSTRAP}):
            yield f"requests {waiting} wait for their peer to acknowledge others; there are {expected}"
        if self._pages.total != sum(pages for _, pages in self._counted.values()):
            yield f"{self._pages.total} pages count as not acknowledged"

    def _owner(self, request: Request) -> str | None:
        peer = self._peers.get(request.outgoing.session) if request.outgoing is not None else None
        return None if peer is None else peer.owner

    def _pages_of(self, request: Request) -> int:
        return -(-request.prompt_tokens // self._page_size)

    def _count(self, request: Request, owner: str) -> None:
        if request.arrival not in self._counted:
            pages = self._pages_of(request)
            self._counted[request.arrival] = (owner, pages)
            self._pages.add(owner, pages)
            self._rows.add(owner, 1)

    def _fits(self, owner: str, pages: int) -> bool:
        """So many pages more leave as much for others as the owner has, or there are no others."""
        if self._peers.owners < 2:
            return True
        return self._pages.leaves_as_much(owner, pages, self._pool_pages) and self._rows.leaves_as_much(
            owner, 1, self._pool_rows
        )
