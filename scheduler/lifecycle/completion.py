"""The end of a request: the client is answered at once, pages are freed when no stage and no peer can access them.

fail() / complete()      the client is answered; by a fetch that leaves pages of use, a little later (leftovers.py)
    │  CancelSend or CancelReceive to the stages, where bytes may be under way
    ▼
SendCancelled / ReceiveCancelled from every stage, and
a prefill server that writes into our pages itself can do so no more
    │  the final reply to the peer: no byte can follow it
    ▼
every plan in flight with the request is done
    ▼
ReleaseRequest           the lease and the metadata row end, here and nowhere else
"""

from headrace.core.incoming import IncomingState
from headrace.core.messages.orders import CancelReceive, CancelSend, ReleaseRequest
from headrace.core.messages.peers import AskCancel, TellCancelled, TellFailed, TellFinished
from headrace.core.messages.replies import RequestFailed, RequestFinished, RequestTraced
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.requests.request import FetchFrom, FirstToken, SendTo
from headrace.scheduler.kv.conversations import PREDICTED
from headrace.scheduler.lifecycle.leftovers import Leftovers
from headrace.scheduler.peers.tickets import EndedTicket
from headrace.scheduler.queues.deadlines import AnswerTimer, BootstrapTimer, LeaseTimer, RequestTimer, TransferTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.transfers import OutgoingTransfer
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class Completion:
    """Ends requests, whatever their phase."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._leftovers = Leftovers(state)

    def fail(self, request: Request, error: ErrorInfo, now: float) -> None:
        """End a request with an error. The first error stays; later ones do nothing."""
        if request.ended:
            return
        if request.fetches_again and error.at_prefill:
            self.compute_here(request, "failed", now)
            return
        request.error, leaves = error, self._leftovers.worthwhile(request, error)
        self._state.metrics.failed(request.phase.value, error)
        self._end(request, Phase.FAILED, now)
        if leaves:
            self._leftovers.begin(request, now)
        else:
            self._state.out.add(RequestFailed(rid=request.rid, error=error))
        outgoing = request.outgoing
        if outgoing is not None and outgoing.final_reply is None:  # else the peer's cancel came first: answer that
            outgoing.final_reply = _tell_failed(outgoing, error)
        self._stop_transfers(request, now)
        self.release_if_safe(request)

    def complete(self, request: Request, reason: str, now: float, first: FirstToken | None = None) -> None:
        """End a request that went well. first: it ended with its first token, and the peer gets no KV."""
        self._end(request, Phase.DONE, now)
        self._state.promises.recent.finished(request)
        self._state.out.add(
            RequestFinished(
                rid=request.rid,
                reason=reason,
                usage=request.usage(),
                timing=request.timing(),
                handoff=request.handoff(self._state.config.page_size),
                peer=self._state.peers.name_of(request),
                promise=request.promise(),
                retained=self._retain(request, now),
                demoted=self._demotable(request),
            )
        )
        outgoing = request.outgoing
        if outgoing is not None:
            session, ticket, generation = outgoing.key
            outgoing.final_reply = TellFinished(session=session, ticket=ticket, generation=generation, first=first)
        self._stop_transfers(request, now)
        self.release_if_safe(request)

    def compute_here(self, request: Request, why: str, now: float) -> None:
        """A preempted request is not fetched a second time. why: label of refetches_total."""
        state = self._state
        if not request.computes_here:
            request.computes_here = True
            state.metrics.counters.add("refetches_total", labels=(why,))
            if request.phase is Phase.WAITING:
                state.of(request).queues.requeue(request)
                state.enter(request, Phase.WAITING, now)
                return
            self._stop_transfers(request, now)
        self.release_if_safe(request)

    def end_moves(self, replica: Replica, error: ErrorInfo, now: float) -> bool:
        """End the requests that only move KV from or to the prefix cache, as their pages are needed; False if there
        are none."""
        moves = [request for request in replica.moves.values() if not request.ended]
        for request in moves:
            self.fail(request, error, now)
        return bool(moves)

    def cancelled_by_peer(self, request: Request, reason: str, now: float) -> None:
        """The peer that has reserved a request cancels it. The request may be ending already."""
        outgoing = request.outgoing
        assert outgoing is not None, "only a peer that has reserved can cancel"
        session, ticket, generation = outgoing.key
        outgoing.final_reply = TellCancelled(session=session, ticket=ticket, generation=generation)
        if request.ended:
            self.release_if_safe(request)
        else:
            self.fail(request, ErrorInfo(code=CANCELLED, message=f"the peer cancelled: {reason}", status=499), now)

    def stage_stopped(self, request: Request, stage: int) -> None:
        """A stage sends or writes no more bytes for the request (SendCancelled, ReceiveCancelled)."""
        if not request.on_stages.stopping:
            self._state.drop("duplicate_answer")
            return
        request.on_stages.stopping.discard(stage)
        if not request.on_stages.stopping:
            self._state.deadlines.clear(AnswerTimer(request.arrival))
        self.release_if_safe(request)

    def release_if_safe(self, request: Request) -> None:
        """Send the final reply and free the pages of an ended request, each as soon as it is safe. One that is not to
        be fetched again starts over then."""
        incoming, outgoing = request.incoming, request.outgoing
        if request.on_stages.stopping or (incoming is not None and incoming.remote_writes):
            return
        if not request.ended:
            if request.starts_over:
                self._state.starting_over[request.arrival] = request
            return
        if outgoing is not None and outgoing.final_reply is not None:
            if outgoing.session in self._state.peers:
                self._state.out.add(outgoing.final_reply)
            outgoing.final_reply = None
        if request.in_flight:
            return
        if self._leftovers.settle(request):
            self._release_row(request)
            self._release_on_stages(request)
        else:
            self._release(request)

    def share(self, rid: str) -> None:
        """Another fetch of the prompt of this request, if it is live, may go on from what has come of it."""
        if (request := self._state.requests.live(rid)) is not None:
            self._leftovers.share(request)

    def started(self, request: Request) -> None:
        """A request has leased its pages: those that a failed attempt before it has left are its own, or of no use."""
        if (before := self._leftovers.followed(request)) is not None:
            self.let_go(before)

    def let_go(self, request: Request) -> None:
        """Do not keep pages of a failed fetch any longer for the next attempt."""
        self._leftovers.end(request)
        self.release_if_safe(request)

    def abort_left(self, rid: str, error: ErrorInfo | None) -> None:
        """A request was aborted that has ended, or is not known."""
        if (left := self._leftovers.abort(rid, error)) is not None:
            self.let_go(left)
        else:
            self._state.drop("unknown_rid")

    def leftover_expired(self, request: Request, now: float) -> None:
        """Pages of a failed fetch were kept for long enough, unless an attempt waits to go on from them."""
        if not self._leftovers.awaited(request, now):
            self.let_go(request)

    def free_pages(self, request: Request) -> None:
        """Take the pages and the metadata row of a request that has ended or was preempted."""
        state = self._state
        if request.lease is not None:
            lease, request.lease = request.lease, None
            cache, terms = state.of(request).cache, request.terms
            cache.release(lease)
            if terms.demote and request.phase is Phase.DONE:
                state.metrics.hint("demote", cache.demote(lease.path))
            if terms.let_go and request.phase is Phase.DONE:
                state.metrics.hint("release", cache.let_go(lease.path))
        self._release_row(request)
        self._release_on_stages(request)

    def _release_row(self, request: Request) -> None:
        if request.row is not None:
            self._state.metadata_rows.release([request.row], request.arrival)
            request.row = None

    def _release_on_stages(self, request: Request) -> None:
        if request.on_stages.known:
            state = self._state
            state.of(request).order(ReleaseRequest(seq=state.out.next_seq(), request=request.serial))
            request.on_stages.known = False

    def end_all(self, error: ErrorInfo, now: float) -> None:
        """End every request without waiting for answers: the stages and all their pages are gone."""
        state = self._state
        for replica in state.replicas:
            replica.plans.clear()
        state.prefills.forget_revocations()
        for request in list(state.requests):
            outgoing = request.outgoing
            if request.incoming is not None:
                request.incoming.stop_writer()
            if outgoing is not None and outgoing.final_reply is not None:  # what it says cannot be relied on any more
                outgoing.final_reply = _tell_failed(outgoing, error)
            request.on_stages.stopping.clear()
            request.on_stages.known = False
            state.deadlines.clear(AnswerTimer(request.arrival))
            if request.leftover is not None:
                self.let_go(request)
            elif request.ended:
                self.release_if_safe(request)
            else:
                self.fail(request, error, now)

    def _release(self, request: Request) -> None:
        state = self._state
        self.free_pages(request)
        state.of(request).moves.pop(request.arrival, None)
        state.requests.remove(request)
        if request.outgoing is not None:
            state.tickets.forget(request.outgoing.key)
        state.prefills.end_fetch(request)

    def _retain(self, request: Request, now: float) -> int:
        """Keep the KV of a request that ends well in the pool, where its terms ask for that, or else where its session
        is expected to go on. Returns for how many tokens what was asked for was granted."""
        retain, cache = request.terms.retain, self._state.of(request).cache
        expected_s = self._expected(request, now)
        if request.lease is None:
            return 0
        if not (request.open or request.route.moves_cached):
            cache.commit(request.lease.path)
        if retain is None:
            if expected_s and not (request.terms.let_go or request.terms.demote):
                cache.retain(request.lease.path, now + expected_s, PREDICTED)
            return 0
        tokens = cache.page_size * cache.retain(request.lease.path, now + retain.seconds, retain.priority)
        self._state.metrics.hint("retain", tokens)
        return tokens

    def _demotable(self, request: Request) -> int:
        """Tokens whose KV goes to a tier when the pages of a request are free, where its terms ask for that."""
        if not request.terms.demote or request.lease is None:
            return 0
        cache = self._state.of(request).cache
        return cache.page_size * cache.demotable(request.lease)

    def _expected(self, request: Request, now: float) -> float:
        """Seconds within which the session of a request that ends well is expected to go on; 0 if that is not known.
        A piece of an open prompt is no turn."""
        terms = request.terms
        if not terms.session or request.open:
            return 0.0
        return self._state.conversations.turn(terms.tenant, terms.prefix_salt, terms.session, request.arrived, now)

    def _end(self, request: Request, phase: Phase, now: float) -> None:
        """Take a request out of every queue, index and deadline of live requests."""
        state = self._state
        state.enter(request, phase, now)
        state.promises.ended(request, now)
        self._report_spans(request)
        state.requests.end(request)
        for timer in (BootstrapTimer, TransferTimer, RequestTimer, LeaseTimer):
            state.deadlines.clear(timer(request.arrival))
        state.of(request).held.remove(request)
        state.unacknowledged.remove(request)
        state.digests.forget(request)
        state.peers.detach(request)
        state.prefills.detach(request)
        if isinstance(request.route, SendTo):
            self._end_ticket(request, request.route.ticket, now)

    def _report_spans(self, request: Request) -> None:
        spans = request.span_log
        if spans is None:
            return
        self._state.out.add(
            RequestTraced(
                rid=request.rid,
                traceparent=request.submit.traceparent,
                spans=tuple(spans.spans),
                dropped=spans.dropped,
                usage=request.usage(),
                handoff=request.handoff(self._state.config.page_size),
                peer=self._state.peer_of(request),
                error=request.error.code if request.error is not None else "",
            )
        )

    def _end_ticket(self, request: Request, ticket: str, now: float) -> None:
        """Remember how the ticket's use ended: for stale messages, or for a peer that has not reserved yet."""
        state, outgoing = self._state, request.outgoing
        if outgoing is not None:
            ended = EndedTicket(outgoing.session, outgoing.generation, request.error)
        else:
            ended = EndedTicket(None, 0, request.error, request.result.first, now + state.config.hold_lease_s)
        state.tickets.end(ticket, ended)

    def _stop_transfers(self, request: Request, now: float) -> None:
        """Stop bytes that may be under way, out or in. Pages are kept until every stage has answered."""
        state = self._state
        if request.on_stages.stopping:
            return
        outgoing, incoming = request.outgoing, request.incoming
        sending = outgoing is not None and outgoing.chunks and (outgoing.unacked or request.phase is Phase.FAILED)
        receiving = incoming is not None and incoming.state is not IncomingState.RECEIVED
        if isinstance(request.route, FetchFrom):
            self._cancel_at_prefill_server(request, request.route)
        if not state.engine.ready or not (sending or receiving):
            return
        order = CancelSend if sending else CancelReceive
        replica = state.of(request)
        replica.order(order(seq=state.out.next_seq(), request=request.serial))
        request.on_stages.stopping = set(replica.ranks)
        # A cancelled send stops once its peer has read what is under way, or is gone. All else is up to the stages.
        peer_reads = sending and outgoing is not None and outgoing.session in state.peers
        timeout = state.config.transfer_timeout_s if peer_reads else state.config.stage_timeout_s
        state.deadlines.set(AnswerTimer(request.arrival), now + timeout)

    def _cancel_at_prefill_server(self, request: Request, route: FetchFrom) -> None:
        """Tell the prefill server that the KV is not needed, where it has been reserved or was posted by a router."""
        incoming, error = request.incoming, request.error
        reason = error.message if error else "no longer needed"
        if incoming is not None and incoming.state is IncomingState.RESERVED:
            self._state.out.add(incoming.ask_cancel(reason))
        elif (
            (incoming is None or incoming.state is IncomingState.PREPARING)
            and route.posting != "local"
            and (error is not None or route.prefix)  # a prefix may have come otherwise
        ):
            release_ticket(self._state, route.prefill, route.ticket, reason, request.replica)


def release_ticket(state: State, prefill: str, ticket: str, reason: str, replica: int = 0) -> None:
    """Tell a prefill server, if it is up, that a ticket that was not reserved will not be. replica: whose session has
    renewed the ticket."""
    session = state.prefills.session(prefill, replica) or state.prefills.any_session(prefill)
    if session is not None:
        state.out.add(AskCancel(session=session, ticket=ticket, generation=0, reason=reason))


def _tell_failed(outgoing: OutgoingTransfer, error: ErrorInfo) -> TellFailed:
    session, ticket, generation = outgoing.key
    return TellFailed(session=session, ticket=ticket, generation=generation, error=error)
