"""State machine of the peer library: when to reserve, renew, cancel and fail loads. Pure: no sockets, no clock.

    LEASED ──LoadKv──► QUEUED ──session, pages, row──► RESERVED ──all chunks──► LOADED ──ReleaseLoad──► (gone)
       │                  │                               │ TicketFailed, bad chunk, silence, session lost
       │ CancelLoad       │ CancelLoad, timeout           │ CancelLoad
       └──────────────────┴───────────────────────────────┴──► (gone)
                                                            ├─► RELEASING ──AskCancel can be sent──► (gone)
                                                            └─► STOPPING ──nothing can be written any more──► (gone)

A RELEASING record has no session with its prefill server yet, and waits for one to release its ticket.

A STOPPING record keeps its pages and its row from others: its prefill server writes into the pages itself (backend shm,
cuda_ipc or nixl), whatever the receiver is told. It has stopped once it says that the ticket has ended
(TicketCancelled, TicketFailed, TicketFinished), or once its session has ended and its write access is revoked
(SessionClosed), which a process that is stopped puts off until it goes on or dies. The owner has its answer long
before.
"""

import math
from collections import deque

from headrace.core.messages.frontend import AddPrefill, RemovePrefill
from headrace.core.messages.orders import CancelReceive
from headrace.core.messages.peers import (
    AskCancel,
    AskRenew,
    PeerEvent,
    PrefillDown,
    PrefillUp,
    TicketCancelled,
    TicketFailed,
    TicketFinished,
)
from headrace.core.messages.stage_events import (
    ChunkReceived,
    KvReceived,
    ReceiveFailed,
    ReceivePrepared,
    SessionClosed,
    StageEvent,
)
from headrace.core.types.errors import PEER_GONE, QUEUE_FULL, TOO_LONG
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.peers.allow_list import PREFILL_NOT_ALLOWED
from headrace.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    ControlPortReply,
    LoadCancelled,
    LoadFailed,
    LoadKv,
    RejectTicket,
    ReleaseLoad,
    RenewLease,
    TicketRef,
)
from headrace.peer.records import RECEIVER, LoadPhase, PeerLimits, PrefillRecord, TicketRecord
from headrace.peer.servers import TOO_MANY, Effect, PrefillServers
from headrace.peer.staging import PageRunAllocator

ANSWERED = (LoadPhase.LOADED, LoadPhase.STOPPING, LoadPhase.RELEASING)
METADATA_ROWS = 256  # concurrent reservations; further loads wait
FINGERPRINT = "fingerprint_mismatch"


class KvLoader:
    """Takes commands and events; appends effects and results, which the caller takes out, in order.

    now: seconds of the monotonic clock, in every method.
    """

    def __init__(self, limits: PeerLimits) -> None:
        """limits: what may be connected to, and the size of the staging area."""
        self.effects: deque[Effect] = deque()
        self.results: deque[AnyResult] = deque()
        self.staging_pages = PageRunAllocator(limits.pages)
        self.stopping_pages = 0  # of STOPPING records
        self._limits = limits
        self._servers = PrefillServers(self.effects, self.results)
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
            case AddPrefill():
                self._servers.keep(command, now)
            case RemovePrefill(name=name):
                self._servers.let_go(name, now)
        self._start(now)

    def handle(self, event: PeerEvent | StageEvent | ControlPortReply, now: float) -> None:
        """Handle an event of the control client, the receiver or a lookup."""
        match event:
            case ControlPortReply():
                self._servers.found(event, now)
            case PrefillUp():
                self._up(event, now)
            case PrefillDown():
                self._down(event, now)
            case TicketFailed() | TicketFinished() | TicketCancelled():
                self._ended(event, now)
            case SessionClosed():
                self._revoked(event.session, now)
            case ReceivePrepared(request=serial) if serial in self._by_serial:
                self._reserve(self._by_serial[serial])
            case ChunkReceived(request=serial) if serial in self._by_serial:
                self._by_serial[serial].deadline = now + self._limits.load_timeout_s
            case KvReceived(request=serial) if serial in self._by_serial:
                self._finish(self._by_serial[serial], event, now)
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
        self._servers.tick(now)
        self._start(now)

    def next_deadline(self) -> float | None:
        """When to call tick() next; None for no deadline."""
        soonest = min((record.deadline for record in self._records.values()), default=math.inf)
        soonest = min(soonest, self._servers.next_deadline())
        return None if soonest == math.inf else soonest

    def _track(self, name: str, ticket: TicketRef, now: float) -> TicketRecord | None:
        """The record of this id, made if necessary; None when its server may not be connected to."""
        if name in self._records:
            return self._records[name]
        server = self._servers.get(ticket)
        if (server is None or not server.told) and self._limits.why_denied(ticket):
            return None
        server = server or self._servers.add(ticket, self._limits.key_of(ticket), now)
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

    def _load(self, load: LoadKv, now: float) -> None:
        """Queue a load, or fail it if it can never succeed."""
        record = self._track(load.id, load.ticket, now)
        ticket, limits = load.ticket, self._limits
        if record is None:
            denied = limits.why_denied(ticket)
            code, text = (PREFILL_NOT_ALLOWED, denied) if denied else (QUEUE_FULL, TOO_MANY)
            self.results.append(LoadFailed(id=load.id, code=code, message=text))
            return
        server = self._server_of(record)
        record.load, record.started = load, now
        record.pages = ceil_div(load.tokens, limits.page_tokens) - load.start // limits.page_tokens
        if ticket.fingerprint not in ("", limits.fingerprint):
            ours = f"{limits.fingerprint} at the decode server" + (f" (model {limits.model})" if limits.model else "")
            text = f"fingerprint: {ticket.fingerprint} at the prefill server, {ours}"
            self._fail(record, FINGERPRINT, text, now)
        elif record.pages > limits.pages:
            text = f"{load.count} tokens; {limits.pages * limits.page_tokens} fit into the staging area"
            self._fail(record, TOO_LONG, text, now)
        elif server.unfit:
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
            server = self._server_of(record)
            if server.session is None:
                waiting.append(record)
                continue
            page = self.staging_pages.allocate(record.pages) if self._rows else None
            if page is None:
                waiting.append(record)
                break
            record.phase, record.page, record.row = LoadPhase.RESERVED, page, self._rows.pop()
            record.deadline = now + self._limits.load_timeout_s
            self.effects.append(record.begin(server.session, server.backend, self._generation()))
        self._queue.extendleft(reversed(waiting))

    def _reserve(self, record: TicketRecord) -> None:
        """Ask the prefill server to send, now that the receiver is ready."""
        if record.phase is LoadPhase.RESERVED and record.incoming is not None:
            ask = record.incoming.prepared(RECEIVER)
            if ask is not None:
                self.effects.append(ask)

    def _finish(self, record: TicketRecord, event: KvReceived, now: float) -> None:
        """All KV is in the staging area: report Loaded."""
        if record.phase is not LoadPhase.RESERVED or record.incoming is None:
            return
        record.incoming.arrived(RECEIVER, event.bytes, event.chunks)
        self._rows.append(record.row)
        record.phase, record.deadline = LoadPhase.LOADED, math.inf
        self.results.append(record.loaded(event.first, self._limits.page_tokens, now))

    def _cancel(self, name: str, now: float) -> None:
        record = self._records.get(name)
        if record is None or record.phase in ANSWERED:
            return
        if record.load is not None:
            self.results.append(LoadCancelled(id=name))
        self._release(name, now)

    def _fail(self, record: TicketRecord, code: str, message: str, now: float, *, notify: bool = True) -> None:
        """Report LoadFailed, if a load was asked for, and release the ticket. notify: see _release."""
        if record.phase in ANSWERED:
            return
        self.results.append(LoadFailed(id=record.id, code=code, message=message))
        self._release(record.id, now, notify=notify)

    def _release(self, name: str, now: float, *, notify: bool = True) -> None:
        """Stop writing for a record, free its space once no prefill server writes there, and tell its prefill server,
        now or once there is a session.

        notify: False when the prefill server knows. A reservation of an ended session needs no message either.
        """
        record = self._records.get(name)
        if record is None or record.phase in ANSWERED:
            return
        session, incoming = self._server_of(record).session, record.incoming
        generation = self._generation() if incoming is None else incoming.generation
        if incoming is not None:
            self.effects.append(CancelReceive(seq=0, request=record.serial))
            notify = notify and session == incoming.session
        elif record.phase is LoadPhase.QUEUED and record in self._queue:
            self._queue.remove(record)
        if notify and session is None:
            record.phase, record.deadline = LoadPhase.RELEASING, now + self._limits.connect_timeout_s
            return
        if notify and session is not None:
            self.effects.append(
                AskCancel(session=session, ticket=record.ticket.name, generation=generation, reason="not needed")
            )
        if incoming is not None and incoming.remote_writes:
            record.phase, record.deadline = LoadPhase.STOPPING, math.inf
            self.stopping_pages += record.pages
            return
        self._close(record, now)

    def _close(self, record: TicketRecord, now: float) -> None:
        """Remove a record and free its row and pages; the only place that does."""
        if record.phase in (LoadPhase.RESERVED, LoadPhase.STOPPING):
            self._rows.append(record.row)
        if record.phase in (LoadPhase.RESERVED, LoadPhase.STOPPING, LoadPhase.LOADED):
            self.staging_pages.free(record.page, record.pages)
        if record.phase is LoadPhase.STOPPING:
            self.stopping_pages -= record.pages
        server = self._servers.get(record.ticket)
        if server is not None and server.records.pop(record.id, None) is not None:
            server.idle_since = now
        del self._records[record.id], self._by_serial[record.serial]

    def _up(self, event: PrefillUp, now: float) -> None:
        """A session is open: open its data connections, renew leases, release tickets that waited for it."""
        server = self._servers.up(event)
        if server is None:
            return
        for record in list(server.records.values()):
            if record.phase is LoadPhase.RELEASING:
                record.phase = LoadPhase.LEASED
                self._release(record.id, now)
            elif record.phase in (LoadPhase.LEASED, LoadPhase.QUEUED):
                record.deadline = math.inf
                self.effects.append(AskRenew(session=event.session, ticket=record.ticket.name))

    def _down(self, event: PrefillDown, now: float) -> None:
        """A session has ended or could not be opened. Fails reservations; queued loads wait for another session."""
        server = self._servers.down(event, now)
        if server is None:
            return
        for record in list(server.records.values()):
            incoming = record.incoming
            lost = incoming is not None and incoming.session != server.session
            if record.phase is LoadPhase.RESERVED and incoming is not None and lost:
                incoming.lose()
                self._fail(record, PEER_GONE, f"the prefill server is gone: {event.reason}", now, notify=False)
            elif record.phase is LoadPhase.QUEUED and event.unfit:
                self._fail(record, "unfit", event.reason, now, notify=False)
            elif record.phase is LoadPhase.QUEUED and record.deadline == math.inf:
                record.deadline = now + self._limits.connect_timeout_s
            if record.phase is LoadPhase.STOPPING and lost:
                del server.records[record.id]  # it waits for SessionClosed, for which the server is not needed
                server.idle_since = now

    def _ended(self, event: TicketFailed | TicketFinished | TicketCancelled, now: float) -> None:
        """The prefill server has ended a ticket, and writes nothing more for it."""
        key = event.session, event.ticket, event.generation
        for record in self._records.values():
            incoming = record.incoming
            if incoming is not None and incoming.key == key and record.phase is not LoadPhase.LOADED:
                break
        else:
            return
        if isinstance(event, TicketCancelled) and record.phase is LoadPhase.RESERVED:
            if incoming.remote_writes:  # that was not asked for: the load goes on, or falls silent
                incoming.stop_writer()
            return
        incoming.end()
        if record.phase is LoadPhase.STOPPING:
            self._close(record, now)
        elif isinstance(event, TicketFailed):
            self._fail(record, event.error.code, event.error.message, now, notify=False)
        elif isinstance(event, TicketFinished):
            self._fail(record, "no_kv", "the first token ended the prompt, so no KV was sent", now, notify=False)

    def _revoked(self, session: str, now: float) -> None:
        """Nothing can be written through an ended session any more."""
        for record in [one for one in self._records.values() if one.phase is LoadPhase.STOPPING]:
            if record.incoming is not None and record.incoming.session == session:
                record.incoming.stop_writer()
                self._close(record, now)

    def _server_of(self, record: TicketRecord) -> PrefillRecord:
        server = self._servers.get(record.ticket)
        assert server is not None, "only servers without records are closed"
        return server

    def _generation(self) -> int:
        self._serials += 1
        return self._serials
