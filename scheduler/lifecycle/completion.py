"""How requests end: once for their owner, at once; and once for their pages, when nobody can touch them any more.

fail() / complete()      the client hears of it now
    │  CancelSend or CancelReceive to the stages, where bytes may be under way
    ▼
every stage Quiet/Forgotten ─► the last word to the peer: no byte can follow it
    │  and whoever writes into our pages itself has said that it has ceased, or cannot write any more
    │  and every plan in flight with the request done
    ▼
finish()                 ReleaseRequest; the lease and the metadata row end here and nowhere else
"""

from headrace.core.messages.frontend import RequestFailed, RequestFinished
from headrace.core.messages.orders import CancelReceive, CancelSend, ReleaseRequest
from headrace.core.messages.peers import AskCancel, ControlServerEffect, TellCancelled, TellFailed, TellFinished
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.request import FetchFrom, FirstToken, SendTo
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import State
from headrace.scheduler.state.tickets import Ended
from headrace.scheduler.state.transfers import IncomingState, OutgoingTransfer


class Completion:
    """The only way out for a request, whatever its phase."""

    def __init__(self, state: State) -> None:
        self._state = state

    def fail(self, request: Request, error: ErrorInfo, now: float) -> None:
        """End a request with an error. The first reason stays; later ones do nothing."""
        if request.ended:
            return
        request.error = error
        self._end(request, Phase.FAILED, error.code, now)
        self._state.out.add(RequestFailed(rid=request.rid, error=error))
        outgoing = request.outgoing
        if outgoing is not None:
            self._prepare(outgoing, _tell_failed(outgoing, error))
        self._quiesce(request, now)
        self.release_if_safe(request)

    def complete(self, request: Request, reason: str, now: float, first: FirstToken | None = None) -> None:
        """End a request that went well. first: it ended with its first token, and the peer gets no KV."""
        self._end(request, Phase.DONE, reason, now)
        self._state.out.add(
            RequestFinished(
                rid=request.rid,
                reason=reason,
                usage=request.usage(),
                timing=request.timing(),
                handoff=request.handoff(self._state.config.page_size),
                prompt_logprobs=request.all_prompt_logprobs(),
            )
        )
        outgoing = request.outgoing
        if outgoing is not None:
            session, ticket, generation = outgoing.key
            outgoing.final_reply = TellFinished(session=session, ticket=ticket, generation=generation, first=first)
        self._quiesce(request, now)
        self.release_if_safe(request)

    def cancelled_by_peer(self, request: Request, reason: str, now: float) -> None:
        """The peer takes its ticket back, from a live request or from one that is ending."""
        outgoing = request.outgoing
        assert outgoing is not None, "only a peer that has reserved can cancel"
        session, ticket, generation = outgoing.key
        outgoing.final_reply = TellCancelled(session=session, ticket=ticket, generation=generation)
        if request.ended:
            self.release_if_safe(request)
        else:
            self.fail(request, ErrorInfo(code=CANCELLED, message=f"the peer cancelled: {reason}", status=499), now)

    def answered(self, request: Request, stage: int) -> None:
        """A stage can write no more bytes for the request (Quiet, Forgotten)."""
        if not request.awaiting_stages:
            self._state.drop("duplicate_answer")
            return
        request.awaiting_stages.discard(stage)
        if not request.awaiting_stages:
            self._state.deadlines.clear(Timer.ANSWER, request.arrival)
        self.release_if_safe(request)

    def release_if_safe(self, request: Request) -> None:
        """Go as far with an ended request as is safe by now."""
        incoming, outgoing = request.incoming, request.outgoing
        if not request.ended or request.awaiting_stages or (incoming is not None and incoming.remote_writes):
            return
        if outgoing is not None and outgoing.final_reply is not None:
            self._say(outgoing.final_reply)
            outgoing.final_reply = None
        if request.in_flight == 0:
            self._finish(request)

    def give_up(self, request: Request) -> None:
        """Take the pages of a request from it without an end of its own: it is preempted, or its engine is gone."""
        state = self._state
        if request.lease is not None:
            state.cache.release(request.lease)
            request.lease = None
        if request.row is not None:
            state.metadata_rows.release([request.row], request.arrival)
            request.row = None
        if request.known_to_stages:
            state.out.add(ReleaseRequest(seq=state.out.next_seq(), request=request.serial))
            request.known_to_stages = False
        del state.records[request.serial]

    def void(self, error: ErrorInfo, now: float) -> None:
        """The engine and all its pages are gone: end every request, waiting for no answer."""
        state = self._state
        state.revoking.clear()
        for request in list(state.records.values()):
            outgoing = request.outgoing
            if request.incoming is not None:
                request.incoming.stop_writer()
            if outgoing is not None and outgoing.final_reply is not None:  # its stages can no longer vouch for anything
                outgoing.final_reply = _tell_failed(outgoing, error)
            request.in_flight = 0
            request.awaiting_stages.clear()
            request.known_to_stages = False
            state.deadlines.clear(Timer.ANSWER, request.arrival)
            if request.ended:
                self.release_if_safe(request)
            else:
                self.fail(request, error, now)

    def _finish(self, request: Request) -> None:
        self.give_up(request)
        del self._state.arrivals[request.arrival]
        if request.outgoing is not None:
            self._state.tickets.forget(request.outgoing.key)
        if request.incoming is not None:
            self._state.fetches.pop(request.incoming.key, None)

    def _end(self, request: Request, phase: Phase, reason: str, now: float) -> None:
        """Take a request out of every queue, index and deadline of the living."""
        state = self._state
        state.unplanned -= request.unplanned
        left = request.phase
        state.enter(request, phase, now)
        state.counters.add("requests_total", labels=("finished" if phase is Phase.DONE else "failed", reason))
        del state.rids[request.rid]
        for timer in (Timer.BOOTSTRAP, Timer.TRANSFER, Timer.REQUEST):
            state.deadlines.clear(timer, request.arrival)
        if left is Phase.WAITING:
            state.waiting.remove(request)
        state.unhold(request)
        state.awaiting_row.pop(request.arrival, None)
        state.prefilling.pop(request.arrival, None)
        state.decoding.pop(request.arrival, None)
        if request.preempting:
            request.preempting = False
            state.preempting -= 1
        self._leave_peers(request, now)

    def _leave_peers(self, request: Request, now: float) -> None:
        state = self._state
        route, outgoing = request.route, request.outgoing
        if isinstance(route, SendTo):
            session, generation = (outgoing.session, outgoing.generation) if outgoing else (None, 0)
            first = request.first if outgoing is None else None
            until = now + state.config.hold_lease_s
            state.tickets.end(route.ticket, Ended(session, generation, request.error, first, until))
        if outgoing is not None and outgoing.session in state.peers:
            state.peers[outgoing.session].requests.pop(request.arrival, None)
        if isinstance(route, FetchFrom) and route.prefill in state.prefills:
            state.prefills[route.prefill].requests.pop(request.arrival, None)

    def _quiesce(self, request: Request, now: float) -> None:
        """Stop bytes that may be under way, in or out."""
        state, route = self._state, request.route
        outgoing, incoming = request.outgoing, request.incoming
        sending = outgoing is not None and outgoing.chunks and (outgoing.unacked or request.phase is Phase.FAILED)
        receiving = incoming is not None and incoming.state is not IncomingState.RECEIVED
        if incoming is not None and incoming.state is IncomingState.RESERVED:
            session, ticket, generation = incoming.key
            reason = request.error.message if request.error else "no longer needed"
            state.out.add(AskCancel(session=session, ticket=ticket, generation=generation, reason=reason))
        elif (
            isinstance(route, FetchFrom)
            and route.posting != "local"
            and request.error is not None
            and (incoming is None or incoming.state is IncomingState.PREPARING)
        ):
            release(state, route.prefill, route.ticket, request.error.message)
        if not state.ready or not (sending or receiving):
            return
        order = CancelSend if sending else CancelReceive
        state.out.add(order(seq=state.out.next_seq(), request=request.serial))
        request.awaiting_stages = set(state.stages)
        state.deadlines.set(Timer.ANSWER, request.arrival, now + state.config.stage_timeout_s)

    def _prepare(self, outgoing: OutgoingTransfer, final_reply: ControlServerEffect) -> None:
        if outgoing.final_reply is None:  # else the peer's cancel came first, and is what gets answered
            outgoing.final_reply = final_reply

    def _say(self, final_reply: ControlServerEffect) -> None:
        if final_reply.session in self._state.peers:
            self._state.out.add(final_reply)


def release(state: State, prefill: str, ticket: str, reason: str) -> None:
    """Tell a prefill server, if its control endpoint can be reached, that nobody will come for a ticket that was not
    reserved."""
    server = state.prefills.get(prefill)
    if server is not None and server.session is not None:
        state.out.add(AskCancel(session=server.session, ticket=ticket, generation=0, reason=reason))


def _tell_failed(outgoing: OutgoingTransfer, error: ErrorInfo) -> TellFailed:
    session, ticket, generation = outgoing.key
    return TellFailed(session=session, ticket=ticket, generation=generation, error=error)
