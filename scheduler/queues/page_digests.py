"""KV of requests that the stages digest, behind the pass that has all of it before it.

    Submit.audit, Submit.digest ─► add() ─► due(): a pass comes behind the positions ─► Forward.digest
                                                                  every rank: PlanDone.digest ─► KvDigested

A pass has its rows' pages until it is done, so that nothing else keeps them for this.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.messages.replies import KvDigested
from headrace.core.messages.stage_events import PlanDone
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.kv.kv_digests import DigestPages, DigestPart, joined
from headrace.core.types.packed import pack
from headrace.scheduler.requests.record import Request


@dataclass(slots=True)
class _Ordered:
    """A digest that a pass was ordered to make."""

    request: Request
    start: int
    end: int
    waiting: set[int]
    """Ranks that have not reported."""

    parts: list[DigestPart] = field(default_factory=list)


class PageDigests:
    """Requests whose KV is to be digested, and digests under way."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: dict[int, Request] = {}
        self._ordered: dict[tuple[int, int], _Ordered] = {}  # by a rank of the replica, its first, and the pass

    def add(self, request: Request) -> None:
        """A request was admitted: note it if its KV is to be digested."""
        if request.submit.audit is not None or request.submit.digest is not None:
            self._requests[request.arrival] = request

    def forget(self, request: Request) -> None:
        """A request has ended."""
        self._requests.pop(request.arrival, None)

    def due(self, seq: int, ranks: Sequence[int], rows: Iterable[tuple[Request, int]]) -> DigestPages | None:
        """What the ranks of a replica are to digest behind the pass seq; None for nothing. rows: its requests, and the
        position behind the last one that is computed of each."""
        for request, computed in rows if self._requests else ():
            if request.arrival not in self._requests or request.lease is None:
                continue
            positions = self._positions(request)
            if positions is None or computed < positions[1]:
                continue
            del self._requests[request.arrival]
            start, end = positions
            self._ordered[ranks[0], seq] = _Ordered(request, start, end, set(ranks))
            pages = request.lease.pages[start // self._page_size : ceil_div(end, self._page_size)]
            return DigestPages(pack(pages), start % self._page_size, end - start)
        return None

    def reported(self, ranks: Sequence[int], event: PlanDone) -> KvDigested | None:
        """One of these ranks is through with a pass; with the last of them the digest is complete."""
        ordered = self._ordered.get((ranks[0], event.seq)) if event.digest else None
        if ordered is None:
            return None
        ordered.waiting.discard(event.stage)
        ordered.parts += event.digest
        if ordered.waiting:
            return None
        del self._ordered[ranks[0], event.seq]
        rid, start, end = ordered.request.rid, ordered.start, ordered.end
        return KvDigested(rid=rid, start=start, end=end, digest=joined(ordered.parts))

    def cancelled(self, ranks: Sequence[int], seq: int) -> None:
        """What a pass has computed is not used: its digest is made again."""
        ordered = self._ordered.pop((ranks[0], seq), None)
        if ordered is not None and not ordered.request.ended:
            self._requests[ordered.request.arrival] = ordered.request

    def clear(self) -> None:
        """The stages are gone, and all requests end."""
        self._ordered.clear()

    def _positions(self, request: Request) -> tuple[int, int] | None:
        """What is to be digested of a request that has its pages; None where nothing was fetched."""
        submit, incoming, size = request.submit, request.incoming, self._page_size
        if submit.digest is not None:
            return submit.digest
        if submit.audit is None or incoming is None or request.computes_here:
            return None
        first = ceil_div(incoming.reservation.cached_tokens, size)
        pages = request.prompt_tokens // size - first
        start = (first + int(submit.audit * pages)) * size
        return (start, start + size) if pages > 0 else None
