"""The two halves of a ticket: the prompt from a client, the pages of a peer. Either may come first."""

from headrace.core.messages.frontend import Progress
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
from headrace.core.types.errors import (
    DRAINING,
    LEASE_EXPIRED,
    NO_PEER,
    NOT_READY,
    PEER_GONE,
    QUEUE_FULL,
    TICKET_IN_USE,
    ErrorInfo,
)
from headrace.core.types.geometry import pages_spanned
from headrace.core.types.packed import packed_length, prompt_hash, unpack
from headrace.core.types.request import SendTo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import DecodePeer, State
from headrace.scheduler.state.tickets import Ended
from headrace.scheduler.state.transfers import OutgoingTransfer


class Rendezvous:
    """Peers, their reservations, and the BOOTSTRAP phase."""

    def __init__(self, state: State, completion: Completion, handoff: KvHandoff) -> None:
        self._state = state
        self._completion = completion
        self._handoff = handoff

    def joined(self, event: PeerJoined, now: float) -> None:
        peer = DecodePeer(
            event.name, event.geometry, event.window_bytes, now, event.geometries, event.backend, event.memory
        )
        self._state.peers[event.session] = peer
        if self._state.ready:
            self._admit(event.session, peer)

    def introduce(self) -> None:
        """Tell stages that have just come up who may attach."""
        for session, peer in self._state.peers.items():
            self._admit(session, peer)

    def gone(self, event: PeerGone, now: float) -> None:
        """Everything on its way to the peer fails; its reservations are void."""
        state = self._state
        peer = state.peers.pop(event.session, None)
        if peer is None:
            state.drop("unknown_session")
            return
        for ticket in [ticket for ticket, early in state.tickets.early.items() if early.session == event.session]:
            self._drop_early(ticket)
        error = ErrorInfo(code=PEER_GONE, message=f"the decode peer is gone: {event.reason}", status=502)
        for request in list(peer.requests.values()):
            self._completion.fail(request, error, now)
        if state.ready:
            state.out.add(DropPeer(seq=state.out.next_seq(), session=event.session))

    def arrive(self, request: Request, route: SendTo, now: float) -> None:
        """Join a request that leaves by wire with its reservation, or wait. Some are computed meanwhile."""
        state = self._state
        ticket = route.ticket
        state.tickets.claim(ticket, request)
        early = state.tickets.early.get(ticket)
        if early is not None:
            self._drop_early(ticket)
            self._match(request, early, now)
            return
        if request.early_prefill:
            state.hold(request)
            state.waiting.push(request)
        if not route.hold:
            state.deadlines.set(Timer.BOOTSTRAP, request.arrival, now + state.config.bootstrap_timeout_s)

    def refuse(self, ticket: str, error: ErrorInfo) -> None:
        """The ticket's request was not admitted: its peer hears of it, now or when it comes. Nothing if another
        request uses the ticket."""
        if self._state.tickets.holder(ticket) is not None:
            return
        early = self._state.tickets.early.get(ticket)
        if early is None:
            self._state.tickets.end(ticket, Ended(None, 0, error))
        else:
            self._fail_early(early, error)

    def reserved(self, event: PeerReserved, now: float) -> None:
        state = self._state
        tickets = state.tickets
        if event.session not in state.peers:
            state.drop("unknown_session")
            return
        if tickets.stale(event.session, event.ticket, event.generation):
            state.drop("stale_generation")
            return
        if tickets.taken(event.ticket):
            self._tell_failed(event, TICKET_IN_USE, f"ticket {event.ticket} is in use", 409)
            return
        tickets.pop_abandoned(event.ticket, now)  # it was another use of the ticket
        request = tickets.holder(event.ticket)
        if request is not None:
            self._match(request, event, now)
        elif (ended := tickets.unheard(event.ticket)) is not None:
            self._tell_ended(event, ended, now)
        elif state.draining or not state.ready:
            code = DRAINING if state.draining else NOT_READY
            self._tell_failed(event, code, f"the server is {code.replace('_', ' ')}", 503)
        elif not event.wait:
            self._tell_failed(event, "unknown_ticket", f"no prompt with ticket {event.ticket} is here", 404)
        elif tickets.full:
            self._tell_failed(event, QUEUE_FULL, "too many reservations wait for their prompts", 429)
        else:
            tickets.early[event.ticket] = event
            state.deadlines.set(Timer.RESERVATION, event.ticket, now + state.config.bootstrap_timeout_s)

    def cancelled(self, event: PeerCancelled, now: float) -> None:
        """Answered when no byte can follow; at once where none is under way."""
        state = self._state
        request = state.tickets.find(event.session, event.ticket, event.generation)
        if request is not None:
            self._completion.cancelled_by_peer(request, event.reason, now)
            return
        early = state.tickets.early.get(event.ticket)
        if early is not None and (early.session, early.generation) == (event.session, event.generation):
            self._drop_early(event.ticket)
        state.out.add(TellCancelled(session=event.session, ticket=event.ticket, generation=event.generation))

    def request_timed_out(self, request: Request, now: float) -> None:
        seconds = self._state.config.bootstrap_timeout_s
        text = f"no peer reserved pages for ticket {request.ticket} within {seconds:g} s"
        self._completion.fail(request, ErrorInfo(code=NO_PEER, message=text, status=504), now)

    def reservation_timed_out(self, ticket: str) -> None:
        early = self._state.tickets.early.get(ticket)
        if early is not None:
            seconds = self._state.config.bootstrap_timeout_s
            text = f"no request came for ticket {ticket} within {seconds:g} s"
            self._fail_early(early, ErrorInfo(code="no_request", message=text, status=404))

    def drop_reservations(self, error: ErrorInfo) -> None:
        """Fail every reservation that waits for its prompt."""
        for early in list(self._state.tickets.early.values()):
            self._fail_early(early, error)

    def promote(self, now: float) -> None:
        """Give metadata rows to held requests that got their pages before their peer came, in the order of the peers,
        and send those that are computed."""
        state = self._state
        while state.awaiting_row and state.metadata_rows.free:
            request = state.awaiting_row.pop(next(iter(state.awaiting_row)))
            request.row = state.metadata_rows.allocate(1, request.arrival)[0]
            if request.phase is Phase.INFLIGHT:
                self._handoff.resume(request, now)

    def _match(self, request: Request, event: PeerReserved, now: float) -> None:
        state = self._state
        peer = state.peers[event.session]
        page_size = peer.geometry.page_size
        request.outgoing = outgoing = OutgoingTransfer(
            session=event.session,
            ticket=event.ticket,
            generation=event.generation,
            dst_pages=unpack(event.pages),
            dst_page_size=page_size,
            dst_row=event.row,
            cached_tokens=event.cached_tokens,
            sent=event.cached_tokens,
        )
        peer.requests[request.arrival] = request
        state.tickets.match(outgoing.key, request)
        state.deadlines.clear(Timer.BOOTSTRAP, request.arrival)
        state.unhold(request)
        problem = _mismatch(request, event, page_size)
        if problem:
            self._completion.fail(request, ErrorInfo(code="bad_reservation", message=problem, status=502), now)
            return
        if request.phase is Phase.BOOTSTRAP:
            state.enter(request, Phase.WAITING, now)
            state.waiting.push(request)
        elif request.phase is not Phase.WAITING:
            state.awaiting_row[request.arrival] = request
        if request.submit.progress:
            total = request.prompt_tokens
            state.out.add(Progress(rid=request.rid, phase="bootstrapped", done=request.computed, total=total))

    def _admit(self, session: str, peer: DecodePeer) -> None:
        out = self._state.out
        out.add(
            AdmitPeer(
                seq=out.next_seq(),
                session=session,
                geometries=peer.geometries or (peer.geometry,),
                window_bytes=peer.window_bytes,
                backend=peer.backend,
                memory=peer.memory,
            )
        )

    def _fail_early(self, early: PeerReserved, error: ErrorInfo) -> None:
        """The ticket has failed for this peer, for good: a later use needs a later generation."""
        self._drop_early(early.ticket)
        self._state.tickets.end(early.ticket, Ended(early.session, early.generation, error))
        self._tell_failed(early, error.code, error.message, error.status)

    def _tell_ended(self, event: PeerReserved, ended: Ended, now: float) -> None:
        """The request has ended with nobody there to hear of it."""
        if ended.error is not None:
            self._fail_early(event, ended.error)
        elif ended.first is not None and now < ended.until:
            session, ticket, generation = event.session, event.ticket, event.generation
            self._state.tickets.end(ticket, Ended(session, generation, None))
            self._state.out.add(TellFinished(session=session, ticket=ticket, generation=generation, first=ended.first))
        else:
            text = f"ticket {event.ticket} has ended with its first token, which is not kept any more"
            self._fail_early(event, ErrorInfo(code=LEASE_EXPIRED, message=text, status=504))

    def _drop_early(self, ticket: str) -> None:
        self._state.tickets.early.pop(ticket, None)
        self._state.deadlines.clear(Timer.RESERVATION, ticket)

    def _tell_failed(self, event: PeerReserved, code: str, message: str, status: int) -> None:
        error = ErrorInfo(code=code, message=message, status=status)
        self._state.out.add(
            TellFailed(session=event.session, ticket=event.ticket, generation=event.generation, error=error)
        )


def _mismatch(request: Request, event: PeerReserved, page_size: int) -> str:
    """How a reservation does not fit the request; "" when it does."""
    if event.prompt_tokens != request.prompt_tokens:
        return f"the peer reserved for {event.prompt_tokens} prompt tokens; the prompt has {request.prompt_tokens}"
    if not 0 <= event.cached_tokens < event.prompt_tokens:
        return f"the peer says it has {event.cached_tokens} of {event.prompt_tokens} tokens"
    needed = pages_spanned(event.cached_tokens, event.prompt_tokens, page_size)
    if event.prompt_hash and event.prompt_hash != (here := prompt_hash(request.submit.prompt)):
        return f"the peer has another prompt: the hash of its token ids is {event.prompt_hash}, here it is {here}"
    pages = packed_length(event.pages)
    if pages != needed:
        return f"the peer reserved {pages} pages of {page_size} tokens; {needed} are needed"
    return ""
