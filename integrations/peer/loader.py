"""What becomes of the tickets that the owner named: when to reserve, renew, cancel and give up. Pure.

KEPT ──LoadKv──► QUEUED ──session and space──► RESERVED ──every chunk──► ARRIVED ──ReleaseLoad──► (gone)
  │              │                              │ LoadFailed, a bad chunk, silence, end of session, CancelLoad
  └──CancelLoad──────┴──► LEAVING ──CancelLoad sent──► (gone) ◄──┘

A record that is LEAVING waits for a session, to release its ticket; the others have nobody to tell.
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
from headrace.core.types.request import FirstToken
from headrace.integrations.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    Discover,
    Found,
    LoadCancelled,
    Loaded,
    LoadFailed,
    LoadKv,
    RejectTicket,
    ReleaseLoad,
    RenewLease,
    TicketRef,
)
from headrace.integrations.peer.records import Limits, LoadPhase, PrefillRecord, TicketRecord, name_of
from headrace.integrations.peer.staging import PAGE_TOKENS, PageRuns

LOOKUP_S = 0.5  # between two questions to an HTTP port
IDLE_S = 60.0  # a session that nobody uses is closed
MAX_SERVERS = 64
METADATA_ROWS = 256  # reservations at a time; others wait
FINGERPRINT = "fingerprint_mismatch"


class KvLoader:
    """Takes commands and events; leaves effects in `out` and answers in `results`, in order."""

    def __init__(self, limits: Limits) -> None:
        self.out: deque[
            ControlClientEffect | OpenSession | CloseSession | PrepareReceive | CancelReceive | Discover
        ] = deque()
        self.results: deque[AnyResult] = deque()
        self.space = PageRuns(limits.pages)
        self._limits = limits
        self._servers: dict[str, PrefillRecord] = {}
        self._records: dict[str, TicketRecord] = {}
        self._by_serial: dict[int, TicketRecord] = {}
        self._queue: deque[TicketRecord] = deque()  # QUEUED, in the order of their commands
        self._rows = list(range(METADATA_ROWS))
        self._serials = 0

    def __len__(self) -> int:
        return len(self._records)

    def apply(self, command: AnyCommand, now: float) -> None:
        """Do what the owner asks."""
        match command:
            case RenewLease():
                self._keep(command.id, command.ticket, now)
            case LoadKv():
                self._load(command, now)
            case RejectTicket():
                self._release(command.id, now)
                self.results.append(LoadFailed(id=command.id, code=command.code, message=command.message))
            case CancelLoad():
                self._cancel(command.id, now)
            case ReleaseLoad():
                record = self._records.get(command.id)
                if record is not None and record.phase is LoadPhase.ARRIVED:
                    self._close(record, now)
        self._start(now)

    def handle(self, event: PeerEvent | StageEvent | Found, now: float) -> None:
        """Take note of what the control client, the receiver or a lookup tells."""
        match event:
            case Found():
                self._found(event, now)
            case PrefillUp():
                self._up(event, now)
            case PrefillDown():
                self._down(event, now)
            case TicketFailed(session=session, ticket=ticket, generation=generation):
                record = self._reserved(session, ticket, generation)
                if record is not None:
                    self._fail(record, event.error.code, event.error.message, now, tell=False)
            case TicketFinished(session=session, ticket=ticket, generation=generation):
                record = self._reserved(session, ticket, generation)
                if record is not None:
                    self._fail(record, "no_kv", "the first token ended the prompt, so no KV was sent", now, tell=False)
            case ReceivePrepared(request=serial) if serial in self._by_serial:
                self._reserve(self._by_serial[serial])
            case ChunkReceived(request=serial) if serial in self._by_serial:
                self._by_serial[serial].deadline = now + self._limits.load_timeout_s
            case KvReceived(request=serial) if serial in self._by_serial:
                self._arrived(self._by_serial[serial], event.first, now)
            case ReceiveFailed(request=serial) if serial in self._by_serial:
                self._fail(self._by_serial[serial], event.code, event.message, now)
            case _:
                pass  # answers to what has been given up
        self._start(now)

    def tick(self, now: float) -> None:
        """Give up what is late, close sessions that nobody uses."""
        for record in [record for record in self._records.values() if record.deadline <= now]:
            server = self._server_of(record)
            if record.phase is LoadPhase.LEAVING:
                self._close(record, now)
            elif server.session is None:
                text = f"no session with {server.name} in {self._limits.connect_timeout_s:g} s: {server.reason}"
                self._fail(record, PEER_GONE, text, now, tell=False)
            else:
                self._fail(record, "timeout", f"nothing came in {self._limits.load_timeout_s:g} s", now)
        for server in list(self._servers.values()):
            if server.records and server.next_lookup <= now:
                server.next_lookup = math.inf
                self.out.append(server.approach())
            if not server.records and server.idle_since + IDLE_S <= now:
                del self._servers[server.name]
                self.out.append(DisconnectPrefill(name=server.name))
                if server.session is not None:
                    self.out.append(CloseSession(seq=0, session=server.session))
        self._start(now)

    def next_deadline(self) -> float | None:
        deadlines = [record.deadline for record in self._records.values()]
        for server in self._servers.values():
            deadlines.append(server.next_lookup if server.records else server.idle_since + IDLE_S)
        soonest = min(deadlines, default=math.inf)
        return None if soonest == math.inf else soonest

    def _keep(self, name: str, ticket: TicketRef, now: float) -> TicketRecord | None:
        """A record of the ticket, or None when its server may not be dialled."""
        if name in self._records or self._limits.barred(ticket):
            return self._records.get(name)
        server = self._servers.get(name_of(ticket)) or self._add(ticket, now)
        if server is None:
            return None
        self._serials += 1
        record = TicketRecord(name, ticket, self._serials, LoadPhase.KEPT)
        self._records[name] = self._by_serial[record.serial] = server.records[name] = record
        if server.session is not None:
            self.out.append(AskRenew(session=server.session, ticket=ticket.name))  # until it is reserved or cancelled
        return record

    def _add(self, ticket: TicketRef, now: float) -> PrefillRecord | None:
        """Begin to reach for a server; None when there are too many."""
        if len(self._servers) >= MAX_SERVERS:
            return None
        server = self._servers[name_of(ticket)] = PrefillRecord(
            name_of(ticket), ticket, self._limits.key_of(ticket), now
        )
        self.out.append(server.approach())
        return server

    def _found(self, found: Found, now: float) -> None:
        """OpenSession the control endpoint that an HTTP port has told of; ask again later when it has told nothing."""
        server = self._servers.get(found.name)
        if server is None:
            return
        if found.control_port:
            self.out.append(server.dial(found.control_port))
        else:
            server.reason, server.next_lookup = found.reason, now + LOOKUP_S

    def _load(self, load: LoadKv, now: float) -> None:
        record = self._keep(load.id, load.ticket, now)
        ticket, limits = load.ticket, self._limits
        if record is None:
            barred = limits.barred(ticket)
            code, text = (PREFILL_NOT_ALLOWED, barred) if barred else (QUEUE_FULL, f"{MAX_SERVERS} prefill servers")
            self.results.append(LoadFailed(id=load.id, code=code, message=text))
            return
        server = self._server_of(record)
        record.load, record.begun = load, now
        record.pages = -(-load.tokens // PAGE_TOKENS) - load.start // PAGE_TOKENS
        if ticket.fingerprint not in ("", limits.fingerprint):
            text = f"fingerprint: {limits.fingerprint} here, {ticket.fingerprint} there"
            self._fail(record, FINGERPRINT, text, now)
        elif record.pages > limits.pages:
            text = f"{load.count} tokens; {limits.pages * PAGE_TOKENS} fit into the staging area"
            self._fail(record, TOO_LONG, text, now)
        elif server.unfit:
            self._fail(record, "unfit", server.reason, now, tell=False)
        else:
            record.phase = LoadPhase.QUEUED
            if server.session is None:
                record.deadline = now + limits.connect_timeout_s
            self._queue.append(record)

    def _start(self, now: float) -> None:
        """PrepareReceive what can be taken now, oldest first; who lacks a session is passed over, who lacks space is
        not."""
        waiting: deque[TicketRecord] = deque()
        while self._queue:
            record = self._queue.popleft()
            session = self._server_of(record).session
            if session is None:
                waiting.append(record)
                continue
            page = self.space.take(record.pages) if self._rows else None
            if page is None:
                waiting.append(record)
                break
            record.phase, record.page, record.row = LoadPhase.RESERVED, page, self._rows.pop()
            record.session, record.generation = session, self._generation()
            record.deadline = now + self._limits.load_timeout_s
            self.out.append(record.expect())
        self._queue.extendleft(reversed(waiting))

    def _reserve(self, record: TicketRecord) -> None:
        """The receiver is ready for the bytes."""
        if record.phase is LoadPhase.RESERVED:
            self.out.append(record.reserve())

    def _arrived(self, record: TicketRecord, first: FirstToken, now: float) -> None:
        load = record.load
        if record.phase is not LoadPhase.RESERVED or load is None:
            return
        self._rows.append(record.row)
        record.phase, record.deadline = LoadPhase.ARRIVED, math.inf
        at = record.page * PAGE_TOKENS + load.start % PAGE_TOKENS
        seconds = now - record.begun
        self.results.append(
            Loaded(id=record.id, at=at, start=load.start, count=load.count, first=first, seconds=seconds)
        )

    def _cancel(self, name: str, now: float) -> None:
        record = self._records.get(name)
        if record is None or record.phase in (LoadPhase.ARRIVED, LoadPhase.LEAVING):
            return  # answered already, or unknown
        if record.load is not None:
            self.results.append(LoadCancelled(id=name))
        self._release(name, now)

    def _fail(self, record: TicketRecord, code: str, message: str, now: float, *, tell: bool = True) -> None:
        """Answer the load, and let the ticket go; tell: the prefill server does not know yet."""
        if record.phase in (LoadPhase.ARRIVED, LoadPhase.LEAVING):
            return
        self.results.append(LoadFailed(id=record.id, code=code, message=message))
        self._release(record.id, now, tell=tell)

    def _release(self, name: str, now: float, *, tell: bool = True) -> None:
        """Write nothing more for a record, give its place back, and tell the prefill server: now or when there is a
        session. A reservation of an ended session needs no word."""
        record = self._records.get(name)
        if record is None or record.phase in (LoadPhase.ARRIVED, LoadPhase.LEAVING):
            return
        session, generation = self._server_of(record).session, record.generation or self._generation()
        if record.phase is LoadPhase.RESERVED:
            self.out.append(CancelReceive(seq=0, request=record.serial))
            tell = tell and session == record.session
        elif record.phase is LoadPhase.QUEUED and record in self._queue:
            self._queue.remove(record)
        if tell and session is None:
            record.phase, record.deadline = LoadPhase.LEAVING, now + self._limits.connect_timeout_s
            return
        if tell and session is not None:
            self.out.append(
                AskCancel(session=session, ticket=record.ticket.name, generation=generation, reason="not needed")
            )
        self._close(record, now)

    def _close(self, record: TicketRecord, now: float) -> None:
        """The only place where a record and what it holds end."""
        if record.phase is LoadPhase.RESERVED:
            self._rows.append(record.row)
        if record.phase in (LoadPhase.RESERVED, LoadPhase.ARRIVED):
            self.space.give(record.page, record.pages)
        server = self._server_of(record)
        del self._records[record.id], self._by_serial[record.serial], server.records[record.id]
        server.idle_since = now

    def _up(self, event: PrefillUp, now: float) -> None:
        server = self._servers.get(event.name)
        if server is None:
            return
        server.session, server.unfit = event.session, False
        self.out.append(
            OpenSession(
                seq=0,
                session=event.session,
                endpoints=event.endpoints,
                geometries=event.geometries,
                window_bytes=event.window_bytes,
                server_key=event.server_key,
            )
        )
        for record in list(server.records.values()):
            if record.phase is LoadPhase.LEAVING:
                record.phase = LoadPhase.KEPT
                self._release(record.id, now)
            elif record.phase is not LoadPhase.ARRIVED:
                record.deadline = math.inf
                self.out.append(AskRenew(session=event.session, ticket=record.ticket.name))

    def _down(self, event: PrefillDown, now: float) -> None:
        """A session has ended, or none came about; what may still come about is waited for."""
        server = self._servers.get(event.name)
        if server is None:
            return
        server.reason, server.unfit = event.reason, event.unfit
        if event.session is not None and event.session == server.session:
            server.session = None
            self.out.append(CloseSession(seq=0, session=event.session))
            if server.ticket.http:  # one that was started again may have its control endpoint elsewhere
                self.out.append(DisconnectPrefill(name=server.name))
                server.next_lookup = now
        for record in list(server.records.values()):
            if record.phase is LoadPhase.RESERVED and record.session != server.session:
                self._fail(record, PEER_GONE, f"the prefill server is gone: {event.reason}", now, tell=False)
            elif record.phase is LoadPhase.QUEUED and event.unfit:
                self._fail(record, "unfit", event.reason, now, tell=False)
            elif record.phase is LoadPhase.QUEUED and record.deadline == math.inf:
                record.deadline = now + self._limits.connect_timeout_s

    def _reserved(self, session: str, ticket: str, generation: int) -> TicketRecord | None:
        for record in self._records.values():
            key = record.session, record.ticket.name, record.generation
            if record.phase is LoadPhase.RESERVED and key == (session, ticket, generation):
                return record
        return None

    def _server_of(self, record: TicketRecord) -> PrefillRecord:
        return self._servers[name_of(record.ticket)]

    def _generation(self) -> int:
        self._serials += 1
        return self._serials
