"""KV receiver of a decode stage: writes incoming chunks into the pool, as an EventSource of the stage's I/O thread.

    chunk ──► expected? ──► checksum ──► write pages ──► Ack ──► ChunkReceived, and KvReceived after the last one
                 │ no          │ wrong   (or they are)
                 └──► Nack ◄───┘ ──► ReceiveFailed, if a request is concerned

It owns one DEALER for each prefill stage that shares KV with this stage; inbound.py decides about chunks. Writes into a
pool in host memory are done at once. Those into a GPU's go on beside (arriving.py), and no request or session is
reported as over while one of its own is under way (G2). Where the prefill stage writes, the prefill server's control
endpoint says when it has stopped writing for a ticket. For a session that ended without such a message, SessionClosed
says so once its write access is revoked.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import msgspec
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import CancelReceive, CloseSession, OpenSession, PrepareReceive
from headrace.core.messages.stage_events import (
    ChunkReceived,
    KvReceived,
    ReceiveCancelled,
    ReceiveFailed,
    ReceivePrepared,
    SessionClosed,
    StageEvent,
)
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Counters, Sample, Stats
from headrace.core.types.errors import PEER_GONE
from headrace.core.types.kv.backends import ZMQ, NixlAccess, writes_directly
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.data import payload
from headrace.transfer.data.arriving import ArrivingChunk, ArrivingChunks
from headrace.transfer.data.attachment import Attachment
from headrace.transfer.data.chunk_verifier import ChunkVerifier
from headrace.transfer.data.inbound import AcceptChunk, Inbound, InboundTable, RejectChunk, RepeatChunk
from headrace.transfer.data.revocation import Revocations
from headrace.transfer.protocol import checksum, draft_frame, messages
from headrace.transfer.protocol.layout import overlap
from headrace.transfer.protocol.messages import Ack, AnswerMessage, Attach, Chunk, Nack, Ping, StageMessage
from headrace.transfer.protocol.metadata import MetadataRows
from headrace.transfer.protocol.page_store import PageStore
from headrace.transfer.sockets import zap, zmq_sockets
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

ReceiverOrder = OpenSession | CloseSession | PrepareReceive | CancelReceive
CHUNKS_PER_PASS = 16  # per connection; a chunk can be many megabytes
WRITE_RECHECK_S = 0.001  # while chunks are on their way into the pool of a GPU
QUEUED_ANSWERS = 8192  # per connection; it is replaced when the stage leaves more unread


@dataclass(slots=True)
class DataLine:
    """The data connection to one prefill stage, with a socket that is replaced when the stage is silent."""

    session: str
    """Secret of the session."""
    stage: int
    """Rank of the prefill stage."""
    source: Geometry
    """Geometry of the prefill stage, cut to the layers and heads that come here."""
    backend: str
    """How KV comes, see core/types/kv/backends.py."""
    connect: Callable[[], Socket]
    """Makes a socket that connects to the stage."""
    attachment: Attachment
    """The timing of its Attach and Ping messages."""
    replica: int
    """Data-parallel replica of the prefill stage."""
    socket: Socket = field(init=False)

    def __post_init__(self) -> None:
        self.socket = self.connect()

    def tick(self, now: float) -> Attach | Ping | None:
        """The message that is due, if any. A stage that was silent for too long gets it on a new connection."""
        message = self.attachment.tick(now)
        if message is not None and self.attachment.stale:
            self._reconnect()
        return message

    def put(self, frame: bytes, now: float) -> bool:
        """Send a frame. False when the queue is full, since the stage does not read: the connection is then replaced
        and what was queued there is lost. The stage sends unanswered chunks again."""
        if zmq_sockets.put(self.socket, (frame,)):
            return True
        self._reconnect()
        self.attachment.lost(now)
        return False

    def _reconnect(self) -> None:
        self.socket.close()
        self.socket = self.connect()


class Receiver:
    """Receives the KV of one stage. An EventSource[StageEvent, ReceiverOrder].

    Args:
        stage: rank of the stage, as its events name it.
        peer_stage: its place among the geometries of the Hello; None: the same.
        geometry: of the stage's pool.
        store: the stage's pool.
        metadata_rows: number of metadata rows, which bounds the row numbers in PrepareReceive.
        registered_pools: the pool as prefill stages may write into it, by backend name.

    Raises ConfigError when the CURVE key file cannot be used.
    """

    def __init__(
        self,
        config: TransferConfig,
        *,
        stage: int,
        geometry: Geometry,
        store: PageStore,
        context: Context,
        metadata_rows: int = 4096,
        registered_pools: Mapping[str, RegisteredPool] | None = None,
        peer_stage: int | None = None,
    ) -> None:
        self._config = config
        self._stage = stage
        self._peer_stage = stage if peer_stage is None else peer_stage
        self._geometry = geometry
        self._store = store
        self._context = context
        self._keys = zap.own_keys(config)
        self._rows = MetadataRows(metadata_rows)
        self._table = InboundTable(geometry)
        self._lines: list[DataLine] = []
        self._registered_pools = dict(registered_pools or {})
        self._revocations = Revocations()
        self._arriving = ArrivingChunks()
        self._recheck_at = 0.0  # while some arrive
        self._counters = Counters()
        for backend in config.backends:
            self._counters.add("bytes_received_total", 0, (backend,))
        for name in ("chunks_received_total", "checksum_failures_total"):
            self._counters.add(name, 0)
        self._verifier = ChunkVerifier(config, store, self._counters)
        self._received: Codec[StageMessage] = Codec(StageMessage)
        self._sent: Codec[AnswerMessage] = Codec(AnswerMessage)

    def sockets(self) -> list[Socket]:
        """Sockets to poll for reading; none while so much is on its way into the pool that no more is taken in."""
        return [] if self._arriving.full else [line.socket for line in self._lines]

    def receive(self, now: float) -> list[StageEvent]:
        """Take in what has come, in a bounded pass."""
        return self._arriving.reportable(event for line in self._lines for event in self._receive(line, now))

    def apply(self, command: ReceiverOrder, now: float) -> list[StageEvent]:
        """Carry out an order of the scheduler."""
        return self._arriving.reportable(self._apply(command, now))

    def _apply(self, command: ReceiverOrder, now: float) -> list[StageEvent]:
        match command:
            case OpenSession():
                return self._open_session(command.terms, now)
            case CloseSession():
                return self._close_session(command.session, now)
            case PrepareReceive():
                return self._prepare(command)
            case CancelReceive():
                self._close(command.request)
                return [ReceiveCancelled(stage=self._stage, request=command.request)]
            case _:
                assert_never(command)

    def tick(self, now: float) -> list[StageEvent]:
        """Do what is due by now."""
        for line in self._lines:
            message = line.tick(now)
            if message is not None:
                self._say(line, message, now)
        written = [event for chunk in self._arriving.take() for event in self._written(chunk, now)]
        self._recheck_at = now + WRITE_RECHECK_S
        closed = [SessionClosed(stage=self._stage, session=session) for session in self._revocations.tick(now)]
        return self._arriving.reportable([*written, *closed])

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        attachments = (line.attachment.next_deadline() for line in self._lines)
        retry = self._revocations.next_deadline()
        recheck = [self._recheck_at] if self._arriving else []
        return min([*attachments, *([] if retry is None else [retry]), *recheck], default=None)

    def close(self) -> None:
        """Close all sockets."""
        for line in self._lines:
            line.socket.close()
        self._lines.clear()

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        attached = sum(line.attachment.attached for line in self._lines)
        gauges = (
            Sample("data_connections", attached),
            Sample("expected_requests", len(self._table)),
            Sample("sessions_being_revoked", len(self._revocations)),
        )
        return Stats(samples=(*gauges, *self._counters.snapshot()))

    def _open_session(self, terms: PrefillTerms, now: float) -> list[StageEvent]:
        self._close_lines(terms.session)
        kind = checksum.kinds(self._config.checksum and not self._verifier.unchecked(terms.backend))[0]
        timeout_s = self._config.peer_timeout_s
        access = self._grant(terms)
        for stage, (endpoint, whole) in enumerate(zip(terms.endpoints, terms.geometries, strict=True)):
            source = overlap(whole, self._geometry)
            if source is None:
                continue
            connect = partial(
                zmq_sockets.connect,
                self._context,
                endpoint,
                max_frame=self._config.max_frame_bytes,
                queue=QUEUED_ANSWERS,
                silence_s=timeout_s,
                keys=self._keys,
                server_key=terms.server_key,
            )
            attach = Attach(
                session=terms.session,
                stage=stage,
                checksum=kind,
                peer_stage=self._peer_stage,
                checksum_shm=self._config.checksum_shm,
                nixl=access,
            )
            attachment = Attachment(attach, timeout_s, now)
            replica = terms.stage_replicas[stage] if terms.stage_replicas else 0
            self._lines.append(DataLine(terms.session, stage, source, terms.backend, connect, attachment, replica))
        return self.tick(now)

    def _grant(self, terms: PrefillTerms) -> NixlAccess | None:
        """What prefill stages need to write into the pool; None where they send frames."""
        registered = self._registered_pools.get(terms.backend)
        try:
            return registered.grant(terms.session) if registered is not None else None
        except OSError as error:
            log.warning("KV comes in frames: the pool cannot be opened for %s: %s", terms.backend, error)
            return None

    def _close_session(self, session: str, now: float) -> list[StageEvent]:
        """Close a session's connections, and begin to revoke the write access of its prefill stages."""
        ended = self._close_lines(session)
        writers = [line.stage for line in ended if writes_directly(line.backend)]
        if not writers:
            return [SessionClosed(stage=self._stage, session=session)]
        over = self._revocations.begin(session, self._registered_pools[ended[0].backend], writers, now)
        return [SessionClosed(stage=self._stage, session=session) for session in over]

    def _close_lines(self, session: str) -> list[DataLine]:
        closed = [line for line in self._lines if line.session == session]
        self._lines = [line for line in self._lines if line.session != session]
        for line in closed:
            line.socket.close()
        return closed

    def _prepare(self, order: PrepareReceive) -> list[StageEvent]:
        lines = [line for line in self._lines if line.session == order.session]
        sources = {line.stage: line.source for line in lines}
        if not sources:
            return [self._receive_failed(order.request, PEER_GONE, "no data connection of this session is open")]
        if order.row >= len(self._rows) or not self._rows.is_clear(order.row):
            text = f"metadata row {order.row} of {len(self._rows)} does not exist or is in use"
            return [self._receive_failed(order.request, messages.BAD_RESERVATION, text)]
        problem = self._table.prepare(order, sources, {line.stage: line.replica for line in lines})
        if problem:
            return [self._receive_failed(order.request, messages.BAD_RESERVATION, problem)]
        return [ReceivePrepared(stage=self._stage, request=order.request)]

    def _receive(self, line: DataLine, now: float) -> list[StageEvent]:
        events: list[StageEvent] = []
        for _ in range(CHUNKS_PER_PASS):
            if self._arriving.full:
                break
            frames = zmq_sockets.take_frames(line.socket)
            if frames is None:
                break
            message = self._decode(frames)
            if isinstance(message, Chunk):
                line.attachment.heard(now)
                events += self._chunk(line, message, frames[1:], now)
            elif message is not None:
                line.attachment.receive(message, now)
        return events

    def _decode(self, frames: list[zmq.Frame]) -> StageMessage | None:
        try:
            if len(frames[0]) > messages.CONTROL_FRAME_BYTES:
                raise DecodeError("the header is too large")
            message = self._received.decode(frames[0].buffer)
            if len(frames) > 1 and not isinstance(message, Chunk):
                raise DecodeError("frames after a message that has none")
        except DecodeError:
            self._counters.add("malformed_frames_total", labels=("receiver",))
            return None
        return message

    def _chunk(self, line: DataLine, header: Chunk, frames: list[zmq.Frame], now: float) -> list[StageEvent]:
        """Handle a chunk. It is always answered, since it takes up the sender's window until it is."""
        if self._arriving.has(line.session, line.stage, header):
            self._counters.add("stale_messages_total", labels=("repeated_chunk",))
            return []  # answered when it is written
        verdict = self._table.check(line.session, line.stage, header, [len(frame) for frame in frames])
        if isinstance(verdict, AcceptChunk):
            verdict = self._verifier.verify(line.backend, verdict, header, [frame.buffer for frame in frames])
        match verdict:
            case AcceptChunk():
                return self._write(line, verdict, header, frames, now)
            case _:
                return self._answer_other(line, verdict, header, now)

    def _answer_other(
        self, line: DataLine, verdict: RepeatChunk | RejectChunk, header: Chunk, now: float
    ) -> list[StageEvent]:
        """Answer a chunk that is not to be written."""
        match verdict:
            case RepeatChunk():
                self._counters.add("stale_messages_total", labels=("repeated_chunk",))
                self._ack(line, header, now)
                return []
            case RejectChunk():
                return self._reject(line, verdict, header, now)

    def _write(
        self, line: DataLine, accept: AcceptChunk, header: Chunk, frames: list[zmq.Frame], now: float
    ) -> list[StageEvent]:
        """Write a chunk's frames into the pool, and accept it when they are there."""
        inbound = accept.inbound
        sizes = [len(frame) for frame in frames]
        first = self._metadata(inbound, frames.pop(0)) if header.total else None
        if first is not None and header.draft_bytes:
            draft = draft_frame.decode(frames.pop(0).buffer, header.ticket, header.generation)
            first = msgspec.structs.replace(first, draft=draft)
        if not header.written:
            buffers = [frame.buffer for frame in frames]
            pages = payload.page_list(header.pages, header.slot)
            write = payload.write_frames(self._store, accept.copies, pages, buffers)
            if not write.done:
                self._recheck_at = now + WRITE_RECHECK_S
                request = inbound.order.request
                self._arriving.add(ArrivingChunk(line.session, line.stage, request, header, sizes, first, write))
                return []
        return self._accept(line, accept, header, first, now)

    def _written(self, chunk: ArrivingChunk, now: float) -> list[StageEvent]:
        """Answer a chunk that is written now. Its request may have ended since, and its connection."""
        header = chunk.header
        line = next((each for each in self._lines if (each.session, each.stage) == (chunk.session, chunk.stage)), None)
        if line is None:
            return []
        verdict = self._table.check(chunk.session, chunk.stage, header, chunk.frames)
        if isinstance(verdict, AcceptChunk):
            return self._accept(line, verdict, header, chunk.first, now)
        return self._answer_other(line, verdict, header, now)

    def _accept(
        self, line: DataLine, accept: AcceptChunk, header: Chunk, first: FirstToken | None, now: float
    ) -> list[StageEvent]:
        """Acknowledge a chunk that is in the pool."""
        inbound = accept.inbound
        request = inbound.order.request
        problem = self._table.written(accept, header, first)
        if problem:
            return self._reject(line, RejectChunk(messages.BAD_CHUNK, problem, inbound), header, now)
        self._counters.add("bytes_received_total", header.payload_bytes, (line.backend if header.written else ZMQ,))
        self._counters.add("chunks_received_total")
        self._ack(line, header, now)
        arrived = ChunkReceived(stage=self._stage, request=request, until=inbound.until)
        if not inbound.complete or inbound.first is None:
            return [arrived]
        self._table.arrive(inbound)
        self._rows.clear(inbound.order.row)
        done = KvReceived(
            stage=self._stage, request=request, first=inbound.first, bytes=inbound.bytes, chunks=inbound.chunks
        )
        return [arrived, done]

    def _metadata(self, inbound: Inbound, frame: zmq.Frame) -> FirstToken:
        """Store the metadata row, once for all source stages. Returns the first token read back from it."""
        row = inbound.order.row
        if self._rows.is_clear(row):
            self._rows.set(row, frame.buffer)
        return self._rows.read(row).first

    def _reject(self, line: DataLine, verdict: RejectChunk, header: Chunk, now: float) -> list[StageEvent]:
        self._counters.add("chunks_rejected_total", labels=(verdict.code,))
        text = messages.text(verdict.message)
        nack = Nack(
            ticket=header.ticket, generation=header.generation, chunk=header.chunk, code=verdict.code, message=text
        )
        self._say(line, nack, now)
        if verdict.inbound is None:
            return []
        request = verdict.inbound.order.request
        self._close(request)
        return [self._receive_failed(request, verdict.code, text)]

    def _close(self, request: int) -> None:
        inbound = self._table.close(request)
        if inbound is not None:
            self._rows.clear(inbound.order.row)

    def _receive_failed(self, request: int, code: str, message: str) -> ReceiveFailed:
        return ReceiveFailed(stage=self._stage, request=request, code=code, message=message)

    def _ack(self, line: DataLine, header: Chunk, now: float) -> None:
        self._say(line, Ack(ticket=header.ticket, generation=header.generation, chunk=header.chunk), now)

    def _say(self, line: DataLine, message: AnswerMessage, now: float) -> None:
        if not line.put(self._sent.encode(message), now):
            self._counters.add("connections_closed_total", labels=("receiver", "unread"))
