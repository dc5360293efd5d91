"""State machine of the peer library: when to reserve, renew, cancel and fail loads. Pure: no sockets, no clock.

    LEASED ──LoadKv──► QUEUED ──session, pages, row──► RESERVED ──all chunks──► LOADED ──ReleaseLoad──► (gone)
       │                  │                               │ TicketFailed, bad chunk, silence, session lost
       │ CancelLoad       │ CancelLoad, timeout           │ CancelLoad
       └──────────────────┴───────────────────────────────┴──► (gone), or RELEASING until AskCancel can be sent

A RELEASING record has no session with its prefill server yet, and waits for one to release its ticket.
"""

import math
from collections import deque

from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    ControlClientEffect,
    DisconnectPrefill,
    PeerEvent,
    PrefillDown,
    PrefillUp,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import ChunkReceived, KvReceived, ReceiveFailed, ReceivePrepared, StageEvent
from headrace.core.types.allow_list import PREFILL_NOT_ALLOWED
from headrace.core.types.errors import PEER_GONE, QUEUE_FULL, TOO_LONG
from headrace.core.types.geometry import ceil_div
from headrace.core.types.request import FirstToken
from headrace.integrations.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    ControlPortReply,
    LoadCancelled,
    LoadFailed,
    LoadKv,
    LookUpControlPort,
    RejectTicket,
    ReleaseLoad,
    RenewLease,
    TicketRef,
)
from headrace.integrations.peer.records import Limits, LoadPhase, PrefillRecord, TicketRecord, server_name
from headrace.integrations.peer.staging import PAGE_TOKENS, PageRunAllocator

LOOKUP_S = 0.5  # between two lookups of a control port
IDLE_S = 60.0  # a session without records is closed after this
MAX_SERVERS = 64
METADATA_ROWS = 256  # concurrent reservations; further loads wait
FINGERPRINT = "fingerprint_mismatch"


class KvLoader:
    """Takes commands and events; appends effects and results, which the caller takes out, in order.

    now: seconds of the monotonic clock, in every method.
    """

    def __init__(self, limits: Limits) -> None:
        """limits: what may be connected to, and the size of the staging area."""
        self.effects: deque[
            ControlClientEffect | OpenSession | CloseSession | PrepareReceive | CancelReceive | LookUpControlPort
        ] = deque()
        self.results: deque[AnyResult] = deque()
        self.staging_pages = PageRunAllocator(limits.pages)
        self._limits = limits
        self._servers: dict[str, PrefillRecord] = {}
        self._records: dict[str, TicketRecord] = {}
        self._by_serial: dict[int, TicketRecord] = {}
        self._queue: deque[TicketRecord] = deque()  # QUEUED records, oldest command first
        self._rows = list(range(METADATA_ROWS))  # free ones
        self._serials = 0

    def __len__(self) -> int:
        """Open uses of tickets."""
        return len(self._records)

    def apply(self, command: AnyCommand, now: float) -> None:
        """Execute a command of the owner."""
        match command:
            case RenewLease():
                self._track(command.id, command.ticket, now)
            case LoadKv():
                self._load(command, now)
            case RejectTicket():
                self._release(command.id, now)
                self.results.append(LoadFailed(id=command.id, code=command.code, message=command.message))
            case CancelLoad():
                self._cancel(command.id, now)
            case ReleaseLoad():
                record = self._records.get(command.id)
                if record is not None and record.phase is LoadPhase.LOADED:
                    self._close(record, now)
        self._start(now)

    def handle(self, event: PeerEvent | StageEvent | ControlPortReply, now: float) -> None:
        """Handle an event of the control client, the receiver or a lookup."""
        match event:
            case ControlPortReply():
                self._found(event, now)
            case PrefillUp():
                self._up(event, now)
            case PrefillDown():
                self._down(event, now)
            case TicketFailed(session=session, ticket=ticket, generation=generation):
                record = self._reserved(session, ticket, generation)
                if record is not None:
                    self._fail(record, event.error.code, event.error.message, now, notify=False)
            case TicketFinished(session=session, ticket=ticket, generation=generation):
                record = self._reserved(session, ticket, generation)
                if record is not None:
                    self._fail(
                        record, "no_kv", "the first token ended the prompt, so no KV was sent", now, notify=False
                    )
            case ReceivePrepared(request=serial) if serial in self._by_serial:
                self._reserve(self._by_serial[serial])
            case ChunkReceived(request=serial) if serial in self._by_serial:
                self._by_serial[serial].deadline = now + self._limits.load_timeout_s
            case KvReceived(request=serial) if serial in self._by_serial:
                self._finish(self._by_serial[serial], event.first, now)
            case ReceiveFailed(request=serial) if serial in self._by_serial:
                self._fail(self._by_serial[serial], event.code, event.message, now)
            case _:
                pass  # about loads that have ended
        self._start(now)

    def tick(self, now: float) -> None:
        """Fail what has passed its deadline, repeat lookups, close idle sessions."""
        for record in [record for record in self._records.values() if record.deadline <= now]:
            server = self._server_of(record)
            if record.phase is LoadPhase.RELEASING:
                self._close(record, now)
            elif server.session is None:
                text = f"no session with {server.name} in {self._limits.connect_timeout_s:g} s: {server.reason}"
                self._fail(record, PEER_GONE, text, now, notify=False)
            else:
                self._fail(record, "timeout", f"no data for {self._limits.load_timeout_s:g} s", now)
        for server in list(self._servers.values()):
            if server.records and server.next_lookup <= now:
                server.next_lookup = math.inf
                self.effects.append(server.first_step())
            if not server.records and server.idle_since + IDLE_S <= now:
                del self._servers[server.name]
                self.effects.append(DisconnectPrefill(name=server.name))
                if server.session is not None:
                    self.effects.append(CloseSession(seq=0, session=server.session))
        self._start(now)

    def next_deadline(self) -> float | None:
        """When to call tick() next; None for no deadline."""
        deadlines = [record.deadline for record in self._records.values()]
        for server in self._servers.values():
            deadlines.append(server.next_lookup if server.records else server.idle_since + IDLE_S)
        soonest = min(deadlines, default=math.inf)
        return None if soonest == math.inf else soonest

    def _track(self, name: str, ticket: TicketRef, now: float) -> TicketRecord | None:
        """The record of this id, made if necessary; None when its server may not be connected to."""
        if name in self._records or self._limits.why_denied(ticket):
            return self._records.get(name)
        server = self._servers.get(server_name(ticket)) or self._add(ticket, now)
        if server is None:
            return None
        self._serials += 1
        record = TicketRecord(name, ticket, self._serials, LoadPhase.LEASED)
        self._records[name] = self._by_serial[record.serial] = server.records[name] = record
        if server.session is not None:
            self.effects.append(
                AskRenew(session=server.session, ticket=ticket.name)
            )  # repeated until it is reserved or cancelled
        return record

    def _add(self, ticket: TicketRef, now: float) -> PrefillRecord | None:
        """Start connecting to a prefill server; None when there are too many already."""
        if len(self._servers) >= MAX_SERVERS:
            return None
        server = self._servers[server_name(ticket)] = PrefillRecord(
            server_name(ticket), ticket, self._limits.key_of(ticket), now
        )
        self.effects.append(server.first_step())
        return server

    def _found(self, found: ControlPortReply, now: float) -> None:
        """Connect to the control endpoint that the HTTP port named, or repeat the lookup later."""
        server = self._servers.get(found.name)
        if server is None:
            return
        if found.control_port:
            self.effects.append(server.connect(found.control_port))
        else:
            server.reason, server.next_lookup = found.reason, now + LOOKUP_S

    def _load(self, load: LoadKv, now: float) -> None:
        """Queue a load, or fail it if it can never succeed."""
        record = self._track(load.id, load.ticket, now)
        ticket, limits = load.ticket, self._limits
        if record is None:
            denied = limits.why_denied(ticket)
            code, text = (PREFILL_NOT_ALLOWED, denied) if denied else (QUEUE_FULL, f"{MAX_SERVERS} prefill servers")
            self.results.append(LoadFailed(id=load.id, code=code, message=text))
            return
        server = self._server_of(record)
        record.load, record.started = load, now
        record.pages = ceil_div(load.tokens, PAGE_TOKENS) - load.start // PAGE_TOKENS
        if ticket.fingerprint not in ("", limits.fingerprint):
            ours = f"{limits.fingerprint} at the decode server" + (f" (model {limits.model})" if limits.model else "")
            text = f"fingerprint: {ticket.fingerprint} at the prefill server, {ours}"
            self._fail(record, FINGERPRINT, text, now)
        elif record.pages > limits.pages:
            text = f"{load.count} tokens; {limits.pages * PAGE_TOKENS} fit into the staging area"
            self._fail(record, TOO_LONG, text, now)
        elif server.incompatible:
            self._fail(record, "unfit", server.reason, now, notify=False)
        else:
            record.phase = LoadPhase.QUEUED
            if server.session is None:
                record.deadline = now + limits.connect_timeout_s
            self._queue.append(record)

    def _start(self, now: float) -> None:
        """Start queued loads, oldest first: skips those without a session, stops at the first without space."""
        waiting: deque[TicketRecord] = deque()
        while self._queue:
            record = self._queue.popleft()
            session = self._server_of(record).session
            if session is None:
                waiting.append(record)
                continue
            page = self.staging_pages.allocate(record.pages) if self._rows else None
            if page is None:
                waiting.append(record)
                break
            record.phase, record.page, record.row = LoadPhase.RESERVED, page, self._rows.pop()
            record.session, record.generation = session, self._generation()
            record.deadline = now + self._limits.load_timeout_s
            self.effects.append(record.prepare_receive())
        self._queue.extendleft(reversed(waiting))

    def _reserve(self, record: TicketRecord) -> None:
        """Ask the prefill server to send, now that the receiver is ready."""
        if record.phase is LoadPhase.RESERVED:
            self.effects.append(record.ask_reserve())

    def _finish(self, record: TicketRecord, first: FirstToken, now: float) -> None:
        """All KV is in the staging area: report Loaded."""
        if record.phase is not LoadPhase.RESERVED:
            return
        self._rows.append(record.row)
        record.phase, record.deadline = LoadPhase.LOADED, math.inf
        self.results.append(record.loaded(first, now))

    def _cancel(self, name: str, now: float) -> None:
        record = self._records.get(name)
        if record is None or record.phase in (LoadPhase.LOADED, LoadPhase.RELEASING):
            return  # answered already, or unknown
        if record.load is not None:
            self.results.append(LoadCancelled(id=name))
        self._release(name, now)

    def _fail(self, record: TicketRecord, code: str, message: str, now: float, *, notify: bool = True) -> None:
        """Report LoadFailed, if a load was asked for, and release the ticket. notify: see _release."""
        if record.phase in (LoadPhase.LOADED, LoadPhase.RELEASING):
            return
        self.results.append(LoadFailed(id=record.id, code=code, message=message))
        self._release(record.id, now, notify=notify)

    def _release(self, name: str, now: float, *, notify: bool = True) -> None:
        """Stop writing for a record, free its space, and tell the prefill server, now or once there is a session.

        notify: False when the prefill server knows. A reservation of an ended session needs no message either.
        """
        record = self._records.get(name)
        if record is None or record.phase in (LoadPhase.LOADED, LoadPhase.RELEASING):
            return
        session, generation = self._server_of(record).session, record.generation or self._generation()
        if record.phase is LoadPhase.RESERVED:
            self.effects.append(CancelReceive(seq=0, request=record.serial))
            notify = notify and session == record.session
        elif record.phase is LoadPhase.QUEUED and record in self._queue:
            self._queue.remove(record)
        if notify and session is None:
            record.phase, record.deadline = LoadPhase.RELEASING, now + self._limits.connect_timeout_s
            return
        if notify and session is not None:
            self.effects.append(
                AskCancel(session=session, ticket=record.ticket.name, generation=generation, reason="not needed")
            )
        self._close(record, now)

    def _close(self, record: TicketRecord, now: float) -> None:
        """Remove a record and free its row and pages; the only place that does."""
        if record.phase is LoadPhase.RESERVED:
            self._rows.append(record.row)
        if record.phase in (LoadPhase.RESERVED, LoadPhase.LOADED):
            self.staging_pages.free(record.page, record.pages)
        server = self._server_of(record)
        del self._records[record.id], self._by_serial[record.serial], server.records[record.id]
        server.idle_since = now

    def _up(self, event: PrefillUp, now: float) -> None:
        """A session is open: open its data connections, renew leases, release tickets that waited for it."""
        server = self._servers.get(event.name)
        if server is None:
            return
        server.session, server.incompatible = event.session, False
        self.effects.append(server.open_session(event))
        for record in list(server.records.values()):
            if record.phase is LoadPhase.RELEASING:
                record.phase = LoadPhase.LEASED
                self._release(record.id, now)
            elif record.phase is not LoadPhase.LOADED:
                record.deadline = math.inf
                self.effects.append(AskRenew(session=event.session, ticket=record.ticket.name))

    def _down(self, event: PrefillDown, now: float) -> None:
        """A session has ended or could not be opened. Fails reservations; queued loads wait for another session."""
        server = self._servers.get(event.name)
        if server is None:
            return
        server.reason, server.incompatible = event.reason, event.unfit
        if event.session is not None and event.session == server.session:
            server.session = None
            self.effects.append(CloseSession(seq=0, session=event.session))
            if server.ticket.http:  # after a restart its control port may differ
                self.effects.append(DisconnectPrefill(name=server.name))
                server.next_lookup = now
        for record in list(server.records.values()):
            if record.phase is LoadPhase.RESERVED and record.session != server.session:
                self._fail(record, PEER_GONE, f"the prefill server is gone: {event.reason}", now, notify=False)
            elif record.phase is LoadPhase.QUEUED and event.unfit:
                self._fail(record, "unfit", event.reason, now, notify=False)
            elif record.phase is LoadPhase.QUEUED and record.deadline == math.inf:
                record.deadline = now + self._limits.connect_timeout_s

    def _reserved(self, session: str, ticket: str, generation: int) -> TicketRecord | None:
        for record in self._records.values():
            key = record.session, record.ticket.name, record.generation
            if record.phase is LoadPhase.RESERVED and key == (session, ticket, generation):
                return record
        return None

    def _server_of(self, record: TicketRecord) -> PrefillRecord:
        return self._servers[server_name(record.ticket)]

    def _generation(self) -> int:
        self._serials += 1
        return self._serials
