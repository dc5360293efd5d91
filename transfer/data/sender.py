"""The sender of a stage: a Port in its I/O thread that ships computed pages to the peers that attached.

    SendChunk ──► outbound queue ──window──► [header][metadata row][page]...[page] ──► peer ──Ack──► ChunkAcked
                               └─ copies into the peer's pool ─► [header: written][metadata row] ──┘

It owns the data ROUTER; transfer/data/outbound.py has the queues and windows. In frames, pages leave without a copy,
straight from the pool, so a page is in use until libzmq has let go of it. Neither that nor the end of a write wakes the
loop, therefore next_deadline() asks for short re-checks, and only while something waits for one. All writes into peers'
pools are begun here, so none is begun after CancelSend or DropPeer has been applied (G2). A connection on which a lane
is not served any more is closed: libzmq then lets go of what it holds for it, whether or not the peer reads.
"""

from collections.abc import Iterator, Mapping
from typing import assert_never

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer, ReleaseRequest, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, PeerLost, SendCancelled, SendFailed, StageEvent
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Counters, Sample, Stats
from headrace.core.trace import Buffer, Outcome, TransferTrace
from headrace.core.types.backends import ZMQ
from headrace.core.types.errors import CANCELLED, PEER_GONE
from headrace.core.types.geometry import Geometry
from headrace.core.types.packed import packed_length, unpack
from headrace.transfer.backends.base import RemotePages, Transport
from headrace.transfer.data import payload
from headrace.transfer.data.outbound import PARTS_IN_FLIGHT, Lane, Outbound, OutPart
from headrace.transfer.data.peer_pools import PeerPools
from headrace.transfer.protocol import checksum, messages, metadata
from headrace.transfer.protocol.layout import Bytes, SourceStore, copies, pages_for
from headrace.transfer.protocol.messages import (
    Ack,
    AnswerMessage,
    Attach,
    Attached,
    Nack,
    Ping,
    Pong,
    Refuse,
    StageMessage,
)
from headrace.transfer.sockets.connections import ENDED, UNREAD
from headrace.transfer.sockets.listener import Arrival, Listener
from headrace.transfer.sockets.zmq_sockets import Context, Socket

SenderOrder = AdmitPeer | DropPeer | SendChunk | CancelSend | ReleaseRequest
FIRST_RECHECK_S = 0.001
LAST_RECHECK_S = 0.02
WRITE_RECHECK_S = 0.002  # while bytes are on their way, of which the peer is to hear when they have come
QUEUED_MESSAGES = 4 * PARTS_IN_FLIGHT  # for one connection, whatever its peer has acknowledged; then it is closed
UNREAD_ANSWERS = 128  # of one connection, of up to 16 KiB each; then TCP holds the peer up


class Sender:
    """A Port of StageEvents and SenderOrders. port: where peers attach. transfers: takes what was answered, while it is
    on. reaches: ways into peers' pools, by backend. Raises ConfigError when it cannot bind."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        stage: int,
        geometry: Geometry,
        store: SourceStore,
        context: Context,
        transfers: Buffer[TransferTrace] | None = None,
        reaches: Mapping[str, Transport] | None = None,
    ) -> None:
        self._config = config
        self._stage = stage
        self._geometry = geometry
        self._store = store
        self._outbound = Outbound(geometry)
        self._transfers: Buffer[TransferTrace] = transfers or Buffer(0)
        self._ways = PeerPools(config, stage, reaches or {})
        self._counters = Counters()
        for backend in config.backends:
            self._counters.add("bytes_sent_total", 0, (backend,))
        self._counters.add("chunks_sent_total", 0)
        self._received: Codec[AnswerMessage] = Codec(AnswerMessage)
        self._sent: Codec[StageMessage] = Codec(StageMessage)
        self._recheck_s = FIRST_RECHECK_S
        self._recheck_at: float | None = None
        self._listener = Listener(
            config,
            context,
            "data",
            port=config.data_port,
            max_frame=messages.ANSWER_FRAME_BYTES,
            queue=QUEUED_MESSAGES,
            unread=UNREAD_ANSWERS,
        )
        self.port = self._listener.port

    def sockets(self) -> tuple[Socket, ...]:
        """Sockets to poll for reading."""
        return self._listener.sockets()

    def receive(self, now: float) -> list[StageEvent]:
        """Take in what has come, in a bounded pass."""
        events: list[StageEvent] = []
        for arrival in self._listener.receive(now):
            events += self._read(arrival, now)
        return [*events, *self._settle(now)]

    def apply(self, command: SenderOrder, now: float) -> list[StageEvent]:
        """Carry out an order of the scheduler."""
        match command:
            case AdmitPeer():
                self._outbound.admit(command)
            case DropPeer():
                self._drop(command.session, now)
                return self._settle(now)
            case SendChunk():
                return [*self._send(command, now), *self._settle(now)]
            case CancelSend():
                self._outbound.cancel(command.request)
                return self._settle(now)
            case ReleaseRequest():
                self._outbound.release(command.request)
            case _:
                assert_never(command)
        return []

    def tick(self, now: float) -> list[StageEvent]:
        """Do what is due by now."""
        limit = WRITE_RECHECK_S if self._outbound.writing else LAST_RECHECK_S
        self._recheck_s = min(2 * self._recheck_s, limit)
        return self.receive(now)

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        refused = self._listener.next_deadline()
        return min((at for at in (self._recheck_at, refused) if at is not None), default=None)

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        self._ways.close(self._outbound.lanes())

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        gauges = (
            Sample("unacked_bytes", self._outbound.unacked_bytes),
            Sample("queued_chunks", self._outbound.queued_chunks),
        )
        return Stats(samples=(*gauges, *self._counters.snapshot(), *self._listener.statistics()))

    def unanswered(self, now: float) -> Iterator[TransferTrace]:
        """What is on its way."""
        for lane, part in self._outbound.in_flight():
            yield _traced(lane, part, "open", now)

    def _read(self, arrival: Arrival, now: float) -> list[StageEvent]:
        body = arrival.body
        try:
            if len(body) != 1 or len(body[0]) > messages.ANSWER_FRAME_BYTES:
                raise DecodeError(f"one frame of up to {messages.ANSWER_FRAME_BYTES} bytes was expected")
            message = self._received.decode(body[0])
        except DecodeError as error:
            self._counters.add("malformed_frames_total", labels=("data",))
            return self._refuse(arrival, messages.BAD_MESSAGE, str(error), now)
        if isinstance(message, Attach):
            return self._attach(arrival, message, now)
        lane = self._outbound.lane_at(arrival.route)
        if lane is None:
            return self._refuse(arrival, messages.NO_SESSION, "this connection is not attached to a session", now)
        match message:
            case Ping():
                self._say(lane, Pong(number=message.number), now)
                return []
            case Ack() | Nack():
                return self._answer(lane, message, now)

    def _attach(self, arrival: Arrival, attach: Attach, now: float) -> list[StageEvent]:
        session = self._outbound.session(attach.session)
        if session is None:
            return self._refuse(arrival, messages.NO_SESSION, "no session of this name is admitted here", now)
        if attach.stage != self._stage:
            text = f"stage {self._stage} here, {attach.stage} asked for"
            return self._refuse(arrival, messages.WRONG_STAGE, text, now)
        lane = session.lanes.get(attach.peer_stage)
        if lane is None:
            text = f"stage {self._stage} shares no layers and heads with stage {attach.peer_stage} of the peer"
            return self._refuse(arrival, messages.WRONG_STAGE, text, now)
        self._ways.open(session.session, lane, attach)
        for left in self._outbound.attach(lane, arrival.route):
            self._listener.drop(left, ENDED, now)
        self._listener.keep(arrival)
        self._say(lane, Attached(stage=self._stage), now)
        return self._pump(lane, now)

    def _drop(self, session: str, now: float) -> None:
        """Let go of all that is kept or queued for a session, without the peer's help."""
        lanes = self._outbound.drop(session)
        for lane in lanes:
            if lane.route is not None:
                self._listener.drop(lane.route, ENDED, now)
        self._ways.close(lanes)

    def _lose(self, lane: Lane, now: float) -> None:
        """Its connection is gone, or has left too much unread to be kept."""
        route = lane.route
        self._outbound.detach(lane)
        if route is not None:
            self._listener.drop(route, UNREAD, now)

    def _answer(self, lane: Lane, answer: Ack | Nack, now: float) -> list[StageEvent]:
        part = self._outbound.answered(lane, (answer.ticket, answer.generation, answer.chunk))
        events: list[StageEvent] = []
        if part is None:
            self._counters.add("stale_messages_total", labels=("ack",))
        elif isinstance(answer, Ack):
            self._note(lane, part, "acknowledged", now)
            self._outbound.acked(part)
        else:
            self._note(lane, part, "refused", now)
            self._counters.add("nacks_total", labels=(answer.code,))
            events = self._refused(part.owner.request, answer)
        return [*events, *self._pump(lane, now)]

    def _refused(self, request: int, nack: Nack) -> list[StageEvent]:
        """A peer that has reserved a ticket and does not know it has taken it back: its CancelSend, on the other
        connection, is on the way."""
        if nack.code == messages.UNKNOWN_TICKET:
            return self._fail(request, CANCELLED, "the peer has taken the ticket back")
        return self._fail(request, nack.code, nack.message)

    def _send(self, order: SendChunk, now: float) -> list[StageEvent]:
        session = self._outbound.session(order.session)
        if session is None:
            return self._fail(order.request, PEER_GONE, "the peer's session has ended")
        needed = (
            pages_for(self._geometry.page_size, order.start, order.count),
            pages_for(session.page_size, order.start, order.count),
        )
        given = (packed_length(order.pages), packed_length(order.dst_pages))
        if given != needed:
            text = f"source and destination pages: {given} given, {needed} needed"
            return self._fail(order.request, messages.BAD_CHUNK, text)
        try:
            row = metadata.encode(order.ticket, order.generation, order.last) if order.last else b""
        except ValueError as error:
            return self._fail(order.request, messages.BAD_METADATA, str(error))
        self._outbound.enqueue(session, order, row)
        return [event for lane in session.lanes.values() for event in self._pump(lane, now)]

    def _note(self, lane: Lane, part: OutPart, outcome: Outcome, now: float) -> None:
        if self._transfers.on:
            self._transfers.add(_traced(lane, part, outcome, now))

    def _fail(self, request: int, code: str, message: str) -> list[StageEvent]:
        """Report a request's failure, once."""
        if not self._outbound.fail(request):
            return []
        return [SendFailed(stage=self._stage, request=request, code=code, message=message)]

    def _pump(self, lane: Lane, now: float) -> list[StageEvent]:
        """Put out what the window allows. One lane's pace never holds up another: nothing here waits."""
        events: list[StageEvent] = []
        while (part := self._outbound.next_part(lane)) is not None:
            part.sent_at = now
            if lane.remote is None:
                self._send_frames(lane, part, now)
                continue
            try:
                self._write(lane, lane.remote, part, now)
            except IndexError as error:
                self._outbound.answered(lane, part.key)
                events += self._fail(part.owner.request, messages.BAD_CHUNK, str(error))
        return events

    def _send_frames(self, lane: Lane, part: OutPart, now: float) -> None:
        order = part.chunk.order
        plan = copies(self._geometry, lane.destination, order.start, order.count)
        frames = payload.frames(self._store, plan, unpack(order.pages))
        digest = checksum.of_frames([part.chunk.row, *frames]) if lane.checksum else None
        self._transmit(lane, part, digest, frames, now)

    def _write(self, lane: Lane, remote: RemotePages, part: OutPart, now: float) -> None:
        """Write a part, unless it has been written before, and announce it when it is. Raises IndexError for pages that
        the peer's pool has not."""
        if part.write is None:
            order = part.chunk.order
            passage = payload.Passage(self._geometry, lane.destination, order.start, order.count)
            digest = checksum.Digest(part.chunk.row) if lane.checksum else None
            payload.write_through(self._store, remote, passage, unpack(order.pages), unpack(order.dst_pages), digest)
            part.checksum = digest.intdigest() if digest is not None else None
            part.write = remote.flush()
            part.handles.append(part.write)
            self._counters.add("bytes_sent_total", part.payload_bytes, (lane.backend,))
        if part.write.done:
            self._transmit(lane, part, part.checksum, [], now)
        else:
            lane.writing.append(part)

    def _transmit(self, lane: Lane, part: OutPart, digest: int | None, frames: list[Bytes], now: float) -> None:
        """Put a part on the lane's connection: what it says, and its frames unless the bytes are there already."""
        header = self._sent.encode(part.header(digest))
        row = [part.chunk.row] if part.chunk.row else []
        handles = self._listener.put_tracked([lane.route or b"", header, *row], frames)
        if handles is None:
            self._lose(lane, now)
            return
        part.handles.extend(handles)
        self._counters.add("chunks_sent_total")
        if frames:
            self._counters.add("bytes_sent_total", part.payload_bytes, (ZMQ,))

    def _settle(self, now: float) -> list[StageEvent]:
        written = self._outbound.written()
        for lane, part in written:
            self._transmit(lane, part, part.checksum, [], now)
        acked, quiet = self._outbound.settle()
        if written or acked or quiet or not self._outbound.unsettled:
            self._recheck_s, self._recheck_at = FIRST_RECHECK_S, None
        if self._outbound.unsettled and (self._recheck_at is None or self._recheck_at <= now):
            self._recheck_at = now + self._recheck_s
        return [
            *(PeerLost(stage=self._stage, session=session, reason=why) for session, why in self._outbound.lost()),
            *(
                ChunkAcked(stage=self._stage, request=chunk.order.request, chunk=chunk.order.chunk, bytes=chunk.bytes)
                for chunk in acked
            ),
            *(SendCancelled(stage=self._stage, request=request) for request in quiet),
        ]

    def _refuse(self, arrival: Arrival, code: str, message: str, now: float) -> list[StageEvent]:
        self._counters.add("refusals_total", labels=("data", code))
        refusal = Refuse(code=code, message=messages.text(message))
        lane = self._outbound.lane_at(arrival.route)
        if lane is not None:
            self._say(lane, refusal, now)
        else:
            self._listener.refuse(arrival, self._sent.encode(refusal), now)
        return []

    def _say(self, lane: Lane, message: StageMessage, now: float) -> None:
        """Best effort: if the connection has closed, the peer asks again on the next one."""
        if not self._listener.put(lane.route or b"", self._sent.encode(message)):
            self._lose(lane, now)


def _traced(lane: Lane, part: OutPart, outcome: Outcome, now: float) -> TransferTrace:
    order = part.chunk.order
    return TransferTrace(
        request=order.request,
        ticket=order.ticket,
        chunk=order.chunk,
        peer_stage=lane.stage,
        bytes=part.payload_bytes,
        sent=part.sent_at,
        ended=now,
        outcome=outcome,
    )
