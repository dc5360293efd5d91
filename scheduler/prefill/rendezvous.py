"""The rendezvous of a ticket's two halves: the prompt from a client, and the pages that a peer reserves. Either may
come first."""

from headrace.core.messages.orders import AdmitPeer, DropPeer
from headrace.core.messages.peers import (
    PeerCancelled,
    PeerGone,
    PeerJoined,
    PeerReserved,
    TellCancelled,
    TellFailed,
    TellFinished,
)
from headrace.core.types import refusals
from headrace.core.types.errors import (
    LEASE_EXPIRED,
    MODEL_NOT_FOUND,
    NO_PEER,
    PEER_GONE,
    TICKET_IN_USE,
    ErrorInfo,
)
from headrace.core.types.packed import unpack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.adapters import adapter_mismatch
from headrace.core.types.requests.request import SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.peers.tickets import EndedTicket
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.queues.deadlines import AnswerTimer, BootstrapTimer, LeaseTimer, ReservationTimer
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.requests.transfers import OutgoingTransfer
from headrace.scheduler.state.state import State


class Rendezvous:
    """Decode peers, their reservations, and the BOOTSTRAP phase."""

    def __init__(self, state: State, completion: Completion, handoff: KvHandoff) -> None:
        self._state = state
        self._completion = completion
        self._handoff = handoff

    def joined(self, event: PeerJoined, now: float) -> None:
        """A peer was welcomed: stages let it attach."""
        peer = self._state.peers.join(event, self._state.engine.stages, now)
        if self._state.engine.ready:
            self._admit(peer.hello.terms)

    def stages_up(self) -> None:
        """Tell stages that have just come up which peers may attach."""
        for peer in self._state.peers:
            self._admit(peer.hello.terms)

    def gone(self, event: PeerGone, now: float) -> None:
        """Fail everything on its way to the peer, and drop its reservations."""
        state = self._state
        peer = state.peers.leave(event.session, event.reason, now)
        if peer is None:
            state.drop("unknown_session")
            return
        for early in state.tickets.early_reservations:
            if early.session == event.session:
                self._drop_early(early.reservation.ticket)
        error = ErrorInfo(code=PEER_GONE, message=f"the decode peer is gone: {event.reason}", status=502)
        for request in list(peer.requests.values()):
            self._completion.fail(request, error, now)
        for request in state.requests:
            if (
                request.on_stages.stopping
                and request.outgoing is not None
                and request.outgoing.session == event.session
            ):
                # From now on nothing outside the stages can delay their answers.
                state.deadlines.set(AnswerTimer(request.arrival), now + state.config.stage_timeout_s)
        if state.engine.ready:
            state.out.add(DropPeer(seq=state.out.next_seq(), session=event.session))

    def submitted(self, request: Request, route: SendTo, now: float) -> None:
        """Match an admitted request with its reservation, or have it wait for one. Some are computed meanwhile."""
        state, ticket = self._state, route.ticket
        state.tickets.claim(ticket, request)
        early = state.tickets.early(ticket)
        if early is not None:
            self._drop_early(ticket)
            self._match(request, early, now)
            return
        if request.early_prefill:
            state.of(request).held.add(request)
        if not route.hold:
            state.deadlines.set(BootstrapTimer(request.arrival), now + state.config.bootstrap_timeout_s)

    def refuse(self, ticket: str, error: ErrorInfo) -> None:
        """The ticket's request was not admitted: tell its peer, now or when it reserves. Does nothing if another
        request uses the ticket."""
        tickets = self._state.tickets
        if tickets.holder(ticket) is not None:
            return
        early = tickets.early(ticket)
        if early is None:
            tickets.end(ticket, EndedTicket(None, 0, error))
        else:
            self._fail_reservation(early, error)

    def reserved(self, event: PeerReserved, now: float) -> None:
        """A peer reserves pages: match them with the ticket's request, keep them for it, or say why not."""
        state, tickets, ticket = self._state, self._state.tickets, event.reservation.ticket
        if event.session not in state.peers:
            state.drop("unknown_session")
            return
        if tickets.stale(event.session, ticket, event.reservation.generation):
            state.drop("stale_generation")
            return
        if tickets.reserved(ticket):
            self._tell_failed(event, TICKET_IN_USE, f"ticket {ticket} is in use", 409)
            return
        tickets.pop_abandoned(ticket, now)  # that was another use of the ticket
        request = tickets.holder(ticket)
        if request is not None:
            self._match(request, event, now)
        elif (ended := tickets.unreported_end(ticket)) is not None:
            self._report_end(event, ended, now)
        elif state.draining or not state.engine.ready:
            kind = refusals.DRAINING_FOR_PEER if state.draining else refusals.NOT_READY_FOR_PEER
            self._tell(event, kind.error())
        elif not event.reservation.wait:
            self._tell_failed(event, "unknown_ticket", f"no prompt with ticket {ticket} is here", 404)
        elif tickets.full(owner := self._state.peers[event.session].owner):
            self._tell(event, refusals.RESERVATIONS_WAIT.error())
        else:
            tickets.reserve_early(event, owner)
            state.deadlines.set(ReservationTimer(ticket), now + state.config.bootstrap_timeout_s)

    def cancelled(self, event: PeerCancelled, now: float) -> None:
        """A peer cancels its reservation. It is answered when no byte can follow; at once where none is under way."""
        state = self._state
        request = state.tickets.find(event.session, event.ticket, event.generation)
        if request is not None:
            self._completion.cancelled_by_peer(request, event.reason, now)
            return
        early = state.tickets.early(event.ticket)
        if early is not None and early.key == (event.session, event.ticket, event.generation):
            self._drop_early(event.ticket)
        state.out.add(TellCancelled(session=event.session, ticket=event.ticket, generation=event.generation))

    def request_timed_out(self, request: Request, now: float) -> None:
        """No peer has reserved pages for a request in time, nor said that it is going to."""
        config = self._state.config
        if now >= request.arrived + config.longest_wait_s > request.arrived + config.bootstrap_timeout_s:
            text = f"no peer reserved pages for ticket {request.ticket} within the limit of {config.longest_wait_s:g} s"
        else:
            text = f"no peer reserved or renewed ticket {request.ticket} within {config.bootstrap_timeout_s:g} s"
        self._completion.fail(request, ErrorInfo(code=NO_PEER, message=text, status=504), now)

    def reservation_timed_out(self, ticket: str) -> None:
        """No request has come for a reservation in time."""
        early = self._state.tickets.early(ticket)
        if early is not None:
            seconds = self._state.config.bootstrap_timeout_s
            text = f"no request came for ticket {ticket} within {seconds:g} s"
            self._fail_reservation(early, ErrorInfo(code="no_request", message=text, status=404))

    def drop_reservations(self, error: ErrorInfo) -> None:
        """Fail every reservation that waits for its prompt."""
        for early in self._state.tickets.early_reservations:
            self._fail_reservation(early, error)

    def let_in(self, now: float) -> None:
        """Let prompts be computed whose peer has acknowledged enough of others."""
        for request in self._state.unacknowledged.released():
            self._enqueue(request, now)

    def give_out_rows(self, now: float) -> None:
        """Give free metadata rows to requests that were started before their peer reserved, in the order of the
        reservations, and send those whose KV is here."""
        state = self._state
        while state.awaiting_row and state.metadata_rows.free:
            request = state.awaiting_row.pop(next(iter(state.awaiting_row)))
            request.row = state.metadata_rows.allocate(1, request.arrival)[0]
            if request.phase is Phase.INFLIGHT and request.has_kv:
                self._handoff.send_all(request, now)

    def _match(self, request: Request, event: PeerReserved, now: float) -> None:
        """The request has its peer: it may be started, or sent if it was computed before."""
        state, reservation = self._state, event.reservation
        request.outgoing = OutgoingTransfer(
            session=event.session,
            ticket=reservation.ticket,
            generation=reservation.generation,
            dst_pages=unpack(reservation.pages),
            dst_page_size=state.peers[event.session].hello.terms.geometries[0].page_size,
            dst_row=reservation.row,
            dst_slot=reservation.slot,
            cached_tokens=reservation.cached_tokens,
            sent=reservation.cached_tokens,
            draft=reservation.draft,
        )
        state.peers.attach(request)
        state.tickets.match(request.outgoing.key, request)
        state.deadlines.clear(BootstrapTimer(request.arrival))
        state.deadlines.clear(LeaseTimer(request.arrival))
        state.of(request).held.remove(request)
        if (problem := _mismatch(request, reservation)) is not None:
            self._completion.fail(request, problem, now)
            return
        if request.phase is Phase.BOOTSTRAP:
            if not state.unacknowledged.must_wait(request):
                self._enqueue(request, now)
        elif request.phase is Phase.WAITING:
            state.of(request).queues.peer_came(request, now)
        elif request.arrival not in state.of(request).queues.preempting:
            state.of(request).queues.peer_came(request, now)
            state.awaiting_row[request.arrival] = request
            if request.phase is Phase.INFLIGHT:
                state.count_unacknowledged(request, now)
        if request.submit.progress:
            state.out.add(request.progress("bootstrapped", request.computed))

    def _enqueue(self, request: Request, now: float) -> None:
        """Let a request be computed."""
        self._state.rebind(request)
        self._state.enter(request, Phase.WAITING, now)

    def _admit(self, terms: PeerTerms) -> None:
        self._state.out.add(AdmitPeer(seq=self._state.out.next_seq(), terms=terms))

    def _fail_reservation(self, event: PeerReserved, error: ErrorInfo) -> None:
        """The ticket has failed for this peer: a later use needs a later generation."""
        session, ticket, generation = event.key
        self._drop_early(ticket)
        self._state.tickets.end(ticket, EndedTicket(session, generation, error))
        self._tell_failed(event, error.code, error.message, error.status)

    def _report_end(self, event: PeerReserved, ended: EndedTicket, now: float) -> None:
        """The request has ended before its peer reserved: tell it how."""
        session, ticket, generation = event.key
        if ended.error is not None:
            self._fail_reservation(event, ended.error)
        elif ended.first is not None and now < ended.until:
            self._state.tickets.end(ticket, EndedTicket(session, generation, None))
            self._state.out.add(TellFinished(session=session, ticket=ticket, generation=generation, first=ended.first))
        else:
            text = f"ticket {ticket} has ended with its first token, which is not kept any more"
            self._fail_reservation(event, ErrorInfo(code=LEASE_EXPIRED, message=text, status=504))

    def _drop_early(self, ticket: str) -> None:
        self._state.tickets.pop_early(ticket)
        self._state.deadlines.clear(ReservationTimer(ticket))

    def _tell_failed(self, event: PeerReserved, code: str, message: str, status: int) -> None:
        self._tell(event, ErrorInfo(code=code, message=message, status=status))

    def _tell(self, event: PeerReserved, error: ErrorInfo) -> None:
        session, ticket, generation = event.key
        self._state.out.add(TellFailed(session=session, ticket=ticket, generation=generation, error=error))


def _mismatch(request: Request, reservation: Reservation) -> ErrorInfo | None:
    """How a reservation does not fit the prompt; None when it does. The control server has checked the rest of it."""
    code, status, tokens = "bad_reservation", 502, request.prompt_tokens
    if reservation.prompt_tokens != tokens:
        text = f"the peer reserved for {reservation.prompt_tokens} prompt tokens; the prompt has {tokens}"
    elif reservation.prompt_hash and reservation.prompt_hash != (here := request.prompt_hash):
        what = "token ids and images" if request.terms.image_digest else "token ids"
        text = f"the peer has another prompt: the hash of its {what} is {reservation.prompt_hash}, here it is {here}"
    elif reservation.adapter != request.terms.adapter:
        code, status = MODEL_NOT_FOUND, 404
        text = adapter_mismatch(prefill=request.terms.adapter, decode=reservation.adapter)
    else:
        return None
    return ErrorInfo(code=code, message=text, status=status)
