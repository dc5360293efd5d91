"""Checks that no page is reused while bytes of another request may still be read from it or written to it."""

from collections.abc import Sequence

from headrace.core.messages.orders import Forward, Order, PrepareReceive, ReleaseRequest, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, KvReceived, ReceiveCancelled, SendCancelled
from headrace.core.types.packed import unpack
from headrace.scheduler.state.events import Event


class PageGuard:
    """Checks the orders to one replica, and its events: pages that bytes may still be read from or written to are not
    reused."""

    def __init__(self, stages: Sequence[int], page_size: int) -> None:
        self._stages = stages
        self._page_size = page_size
        self._held: dict[int, set[int]] = {}  # pages by request, as long as bytes are under way for it
        self._open: dict[int, set[tuple[int, int]]] = {}  # by request: stages and their chunks (-1: what they receive)
        self._requests: dict[tuple[str, str, int], int] = {}  # by session, ticket and generation
        self._owners: dict[int, int] = {}  # request that a page was last given to

    def order(self, order: Order) -> str | None:
        """Take in an order; returns what it violates, None if nothing."""
        if isinstance(order, Forward):
            for row in order.rows:
                written = set(unpack(row.pages)[row.start // self._page_size :])
                self._owners.update(dict.fromkeys(written, row.request))
                if problem := self._clash(row.request, written):
                    return problem
        elif isinstance(order, PrepareReceive):
            pages = set(unpack(order.pages))
            if problem := self._clash(order.request, pages):
                return problem
            self._requests[order.session, order.ticket, order.generation] = order.request
            self._owners.update(dict.fromkeys(pages, order.request))
            self._hold(order.request, pages, {(stage, -1) for stage in self._stages})
        elif isinstance(order, SendChunk):
            self._hold(order.request, set(unpack(order.pages)), {(stage, order.chunk) for stage in self._stages})
        elif isinstance(order, ReleaseRequest):  # its pages are free: nothing may be written into them for it
            if order.request in self._held:
                return f"request {order.request} is released while its bytes may be under way"
            self._owners = {page: owner for page, owner in self._owners.items() if owner != order.request}
        return None

    def written(self, send: SendChunk) -> str | None:
        """A prefill server has written into our pages directly; returns what that violates, None if nothing."""
        request = self._requests.get((send.session, send.ticket, send.generation))
        others = {owner for page in unpack(send.dst_pages) if (owner := self._owners.get(page)) != request}
        return f"{send.ticket} was written into pages of requests {others}" if others else None

    def event(self, event: Event) -> None:
        """Take in an event: bytes were acknowledged, have arrived, or are not sent or written any more."""
        if isinstance(event, ChunkAcked):
            self._free(event.request, {(event.stage, event.chunk)})
        elif isinstance(event, KvReceived):
            self._free(event.request, {(event.stage, -1)})
        elif isinstance(event, SendCancelled | ReceiveCancelled):
            mine = {entry for entry in self._open.get(event.request, set()) if entry[0] == event.stage}
            self._free(event.request, mine)

    def reset(self) -> None:
        """The engine is gone, and with it all bytes that were under way."""
        self._held.clear()
        self._open.clear()

    def _clash(self, request: int, pages: set[int]) -> str | None:
        for other, held in self._held.items():
            if other != request and held & pages:
                return f"request {request} is given pages {held & pages} that bytes of {other} may still touch"
        return None

    def _hold(self, request: int, pages: set[int], entries: set[tuple[int, int]]) -> None:
        self._held.setdefault(request, set()).update(pages)
        self._open.setdefault(request, set()).update(entries)

    def _free(self, request: int, entries: set[tuple[int, int]]) -> None:
        if request in self._open:
            self._open[request] -= entries
            if not self._open[request]:
                del self._open[request], self._held[request]
