"""What a failed fetch leaves: the leading pages that have come, kept for the next attempt at the same request.

fail() ─► SETTLING: its pages may still be written into     ─► KEPT: the leading ones are in the prefix cache,
              │                                                  │    the others are free; RequestFailed
              └─ after KEEP_S, or aborted: RequestFailed,        └─ the next attempt has leased them, or none comes
                 and nothing is kept                                within KEEP_S: the lease ends

RequestFailed waits for the pages, so that the next attempt finds them: milliseconds, unless a prefill server that
writes into them itself may go on writing. Until a result shows that they are finite, they stay in the prefix cache only
as long as some lease uses them (KvCache.leave).
"""

from headrace.core.incoming import RemoteWriter
from headrace.core.messages.replies import RequestFailed
from headrace.core.types.errors import CHECKSUM, NONFINITE, ErrorInfo
from headrace.core.types.requests.request import FetchFrom
from headrace.scheduler.queues.deadlines import LeftoverTimer
from headrace.scheduler.requests.parts import Leftover
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.state import State

KEEP_S = 0.5
"""How long pages are waited for, and kept for an attempt that has not come."""

LONGEST_S = 5.0
"""How long they are kept for one that has come, and waits for the rest of its pages."""

SUSPECT = frozenset({CHECKSUM, NONFINITE, "bad_chunk", "bad_metadata"})
"""Errors after which nothing that a prefill server has sent of a prompt is used."""


class Leftovers:
    """Requests that have failed, and whose leading pages are to be kept."""

    def __init__(self, state: State) -> None:
        self._state = state

    def worthwhile(self, request: Request, error: ErrorInfo) -> bool:
        """Whether a request that fails with this error has pages that another attempt can go on from."""
        incoming, lease, state = request.incoming, request.lease, self._state
        if request.phase is not Phase.FETCHING or incoming is None or lease is None or not state.engine.ready:
            return False
        route = request.route
        if request.preempted or not isinstance(route, FetchFrom) or route.prefix:
            return False
        if not error.at_prefill or error.code in SUSPECT:
            return False
        came = incoming.leading // state.config.page_size
        return came > lease.matched or state.of(request).cache.proven(lease) < lease.matched

    def share(self, request: Request) -> None:
        """Publish what has come of a fetch that goes on, for a second one of the same prompt. Only where our own stages
        write it: they write no position twice."""
        incoming, lease = request.incoming, request.lease
        if request.phase is not Phase.FETCHING or incoming is None or lease is None or request.preempted:
            return
        if incoming.writer is RemoteWriter.NONE:
            self._state.of(request).cache.share(lease, request.tokens, incoming.leading)

    def begin(self, request: Request, now: float) -> None:
        """Keep the pages of a request that has failed, once nothing writes into them."""
        request.leftover = Leftover.SETTLING
        self._state.requests.leave(request)
        self._state.deadlines.set(LeftoverTimer(request.arrival), now + KEEP_S)

    def settle(self, request: Request) -> bool:
        """Nothing can write into a request's pages any more. True if some of them are kept."""
        state, lease, incoming = self._state, request.lease, request.incoming
        if request.leftover is Leftover.KEPT:
            return True
        if request.leftover is None or lease is None or incoming is None:
            return False
        self._tell(request)
        request.leftover = Leftover.KEPT
        if state.of(request).cache.leave(lease, request.tokens, incoming.leading):
            return True
        self.end(request)
        return False

    def end(self, request: Request) -> None:
        """Its pages are not kept any longer."""
        if request.leftover is Leftover.SETTLING:
            self._tell(request)
        request.leftover = None
        self._state.requests.take(request)
        self._state.deadlines.clear(LeftoverTimer(request.arrival))

    def awaited(self, request: Request, now: float) -> bool:
        """Whether an attempt has come that waits for its other pages; it is asked again after KEEP_S."""
        following = self._state.requests.following(request)
        if request.leftover is Leftover.SETTLING or following is None or now >= request.since + LONGEST_S:
            return False
        self._state.deadlines.set(LeftoverTimer(request.arrival), now + KEEP_S)
        return True

    def followed(self, request: Request) -> Request | None:
        """A request has leased its pages: those of the attempt before it that are of use belong to both leases now.
        Returns that if its pages were kept for this."""
        before = self._state.requests.before(request)
        if before is None or request.lease is None or before.lease is None:
            return None
        both = min(request.lease.matched, len(before.lease.path)) if before.replica == request.replica else 0
        tokens = max(0, both - before.lease.matched) * self._state.config.page_size
        request.resumed = before.resumed + tokens
        if tokens:
            self._state.metrics.counters.add("resumed_prompts_total")
            self._state.metrics.counters.add("resumed_tokens_total", tokens)
        return before if before.leftover is Leftover.KEPT else None

    def abort(self, rid: str, error: ErrorInfo | None) -> Request | None:
        """A request was aborted that is not live. Returns the one that it is, if that waits for its pages to be kept
        and its client has gone."""
        left = self._state.requests.left(rid)
        if left is None or left.leftover is not Leftover.SETTLING or (error is not None and error.at_prefill):
            return None
        return left

    def _tell(self, request: Request) -> None:
        assert request.error is not None, "it has failed"
        self._state.out.add(RequestFailed(rid=request.rid, error=request.error))
