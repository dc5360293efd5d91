"""KV sender of a prefill stage: ships computed pages to attached peers, as an EventSource of the stage's I/O thread.

    SendChunk ──► outbound queue ──window──► [header][row][draft frame][page]...[page] ──► peer ──Ack──► ChunkAcked
                               └─ copies into the peer's pool ─► [header: written][row][…] ──┘

It owns the data ROUTER; outbound.py has the queues and windows, transmitter.py sends parts. In frames, pages leave a
pool in host memory without a copy, so a page is in use until libzmq has let go of it. Neither that nor the end of a
read or write wakes the loop, therefore next_deadline() asks for short re-checks, and only while something waits. All
writes into peers' pools are started here, so none is started after CancelSend or DropPeer was applied (G2). A
connection on which a lane is not served any more is closed: libzmq then lets go of what it holds for it, whether or not
the peer reads.

A peer's pool is opened for writes when its stage attaches, and closed when its session ends, or as soon as writes under
way then are over. One that cannot be opened, whatever was agreed at the handshake, is filled by frames instead.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import assert_never

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, CancelSend, DropPeer, ReleaseRequest, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, PeerLost, SendCancelled, SendFailed, StageEvent
from headrace.core.runtime.codec import Codec, DecodeError
from headrace.core.stats import Counters, Sample, Stats
from headrace.core.trace import Buffer, Outcome, TransferTrace
from headrace.core.types.errors import CANCELLED, PEER_GONE
from headrace.core.types.kv.backends import FAKE, SHM
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import packed_length
from headrace.transfer.backends.base import Transport
from headrace.transfer.data.outbound import PARTS_IN_FLIGHT, Lane, Outbound, OutPart, OutSession
from headrace.transfer.data.transmitter import PageOutOfRange, Transmitter
from headrace.transfer.protocol import checksum, draft_frame, messages, metadata
from headrace.transfer.protocol.layout import pages_for
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
from headrace.transfer.protocol.page_store import Handle, SourceStore
from headrace.transfer.sockets.connections import ENDED
from headrace.transfer.sockets.listener import Arrival, Listener
from headrace.transfer.sockets.zmq_sockets import Context, Socket

log = logging.getLogger(__name__)

SenderOrder = AdmitPeer | DropPeer | SendChunk | CancelSend | ReleaseRequest
FIRST_RECHECK_S = 0.001  # from then on twice as long each time
LAST_RECHECK_S = 0.02  # while libzmq holds frames
COPY_RECHECK_S = 0.002  # while reads or writes are under way, behind which a part is sent or announced
QUEUED_MESSAGES = 4 * PARTS_IN_FLIGHT  # per connection, whatever its peer has acknowledged; then it is closed
UNREAD_ANSWERS = 128  # per connection, of up to 16 KiB each; then TCP holds the peer up


class Sender:
    """Sends the chunks of one stage to its peers. An EventSource[StageEvent, SenderOrder].

    Args:
        stage: rank, as in events.
        number: of this rank in Welcome, its place among those that offer KV; None: the same as stage.
        geometry: of the rank's pool.
        offers: whether peers are sent anything from here; orders to send are ignored otherwise.
        store: the rank's pool.
        transfers: records answered parts while tracing is on.
        transports: for writing into peers' pools, by backend name.

    Attributes:
        port: TCP port at which peers attach.

    Raises ConfigError when it cannot bind, or a CURVE key cannot be used.
    """

    def __init__(
        self,
        config: TransferConfig,
        *,
        stage: int,
        geometry: Geometry,
        store: SourceStore,
        context: Context,
        number: int | None = None,
        offers: bool = True,
        transfers: Buffer[TransferTrace] | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        self._config = config
        self._stage = stage
        self._number = stage if number is None else number
        self._offers = offers
        self._geometry = geometry
        self._outbound = Outbound(geometry)
        self._transfers: Buffer[TransferTrace] = transfers or Buffer(0)
        self._transports = dict(transports or {})
        self._closing: list[Handle] = []  # peers' pools that writes under way keep open
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
        self._transmitter = Transmitter(geometry, store, self._outbound, self._listener, self._counters)
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
            case AdmitPeer() | SendChunk() if not self._offers:
                pass  # other ranks offer the same KV
            case AdmitPeer():
                self._outbound.admit(command.terms)
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
        limit = COPY_RECHECK_S if self._outbound.copying else LAST_RECHECK_S
        self._recheck_s = min(2 * self._recheck_s, limit)
        return self.receive(now)

    def next_deadline(self) -> float | None:
        """When tick() has to be called next."""
        refused = self._listener.next_deadline()
        return min((at for at in (self._recheck_at, refused) if at is not None), default=None)

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        self._close_pools(self._outbound.lanes())

    def statistics(self) -> Stats:
        """Counters and gauges for /metrics."""
        gauges = (
            Sample("unacked_bytes", self._outbound.unacked_bytes),
            Sample("queued_chunks", self._outbound.queued_chunks),
        )
        return Stats(samples=(*gauges, *self._counters.snapshot(), *self._listener.statistics()))

    def unanswered(self, now: float) -> Iterator[TransferTrace]:
        """Parts that were sent and are not answered, for a recording that ends."""
        for lane, part in self._outbound.in_flight():
            yield part.trace(lane.stage, "open", now)

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
                self._transmitter.say(lane, Pong(number=message.number), now)
                return []
            case Ack() | Nack():
                return self._answer(lane, message, now)

    def _attach(self, arrival: Arrival, attach: Attach, now: float) -> list[StageEvent]:
        lane = _attached_lane(self._outbound.session(attach.session), self._number, attach)
        if isinstance(lane, Refuse):
            return self._refuse(arrival, lane.code, lane.message, now)
        self._open_pool(lane, attach)
        for left in self._outbound.attach(lane, arrival.route):
            self._listener.drop(left, ENDED, now)
        self._listener.keep(arrival)
        self._transmitter.say(lane, Attached(stage=self._number), now)
        return self._pump(lane, now)

    def _drop(self, session: str, now: float) -> None:
        """End a session: close its connections with all that is queued on them, and the peer's pools."""
        lanes = self._outbound.drop(session)
        for lane in lanes:
            if lane.route is not None:
                self._listener.drop(lane.route, ENDED, now)
        self._close_pools(lanes)

    def _open_pool(self, lane: Lane, attach: Attach) -> None:
        """Open the pool of the peer's stage for writes on its first attach, and decide whether its chunks have
        checksums."""
        memory, lane.memory = lane.memory, None
        transport = self._transports.get(lane.backend)
        if memory is not None and transport is not None:
            try:
                lane.remote = transport.open(attach.session, self._number, lane.destination, memory, attach.nixl)
                if lane.remote.unchecked and attach.checksum != checksum.NONE:
                    self._close_pools([lane])
                    raise ValueError("it asks for checksums, which the memory of a GPU has not (--no-checksum there)")
            except (OSError, ValueError) as error:
                text = "KV goes to stage %d of a peer in frames: its pool cannot be opened by %s: %s"
                log.warning(text, lane.stage, lane.backend, error)
        lane.checksum = _checksums(lane, attach, self._config)

    def _close_pools(self, lanes: Iterable[Lane] = ()) -> None:
        """Start no write to these peers' stages any more, and let go of those whose last writes are over."""
        for lane in lanes:
            if lane.remote is not None:
                self._closing.append(lane.remote.close())
                lane.remote = None
        self._closing = [pool for pool in self._closing if not pool.done]

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
        """Fail a request that the peer has refused a part of.

        A peer that has reserved a ticket and does not know it any more has cancelled it: its Cancel is under way on the
        control connection.
        """
        if nack.code == messages.UNKNOWN_TICKET:
            return self._fail(request, CANCELLED, "the peer has taken the ticket back")
        return self._fail(request, nack.code, nack.message)

    def _send(self, order: SendChunk, now: float) -> list[StageEvent]:
        session = self._outbound.session(order.session)
        if session is None:
            return self._fail(order.request, PEER_GONE, "the peer's session has ended")
        problem = _page_error(order, self._geometry.page_size, session.page_size)
        if problem:
            return self._fail(order.request, messages.BAD_CHUNK, problem)
        try:
            row, draft = _last_frames(order)
        except ValueError as error:
            return self._fail(order.request, messages.BAD_METADATA, str(error))
        self._outbound.enqueue(session, order, row, draft)
        return [event for lane in session.lanes.values() for event in self._pump(lane, now)]

    def _note(self, lane: Lane, part: OutPart, outcome: Outcome, now: float) -> None:
        if self._transfers.on:
            self._transfers.add(part.trace(lane.stage, outcome, now))

    def _fail(self, request: int, code: str, message: str) -> list[StageEvent]:
        """Report a request's failure, once."""
        if not self._outbound.fail(request):
            return []
        return [SendFailed(stage=self._stage, request=request, code=code, message=message)]

    def _pump(self, lane: Lane, now: float) -> list[StageEvent]:
        """Send what the window allows. One lane's pace never holds up another: nothing here waits."""
        events: list[StageEvent] = []
        while (part := self._outbound.next_part(lane)) is not None:
            part.sent_at = now
            events += self._transmit(lane, part, now)
        return events

    def _transmit(self, lane: Lane, part: OutPart, now: float) -> list[StageEvent]:
        try:
            self._transmitter.send(lane, part, now)
        except PageOutOfRange as error:
            self._outbound.answered(lane, part.key)
            return self._fail(part.owner.request, messages.BAD_CHUNK, str(error))
        return []

    def _settle(self, now: float) -> list[StageEvent]:
        """Go on behind finished reads and writes, report what libzmq and they have let go of, and plan the next
        re-check."""
        events: list[StageEvent] = []
        copied = self._outbound.copied()
        for lane, part in copied:
            if part.key not in lane.in_flight:  # the connection was lost with a part before it
                continue
            if part.owner.open:
                events += self._transmit(lane, part, now)
            else:  # the peer has not heard of it, so it will not answer
                self._outbound.answered(lane, part.key)
                events += self._pump(lane, now)
        acked, cancelled = self._outbound.settle()
        self._close_pools()
        waits = self._outbound.unsettled or bool(self._closing)
        if copied or acked or cancelled or not waits:
            self._recheck_s, self._recheck_at = FIRST_RECHECK_S, None
        if waits and (self._recheck_at is None or self._recheck_at <= now):
            self._recheck_at = now + self._recheck_s
        return [
            *events,
            *(PeerLost(stage=self._stage, session=session, reason=why) for session, why in self._outbound.lost()),
            *(
                ChunkAcked(stage=self._stage, request=chunk.order.request, chunk=chunk.order.chunk, bytes=chunk.bytes)
                for chunk in acked
            ),
            *(SendCancelled(stage=self._stage, request=request) for request in cancelled),
        ]

    def _refuse(self, arrival: Arrival, code: str, message: str, now: float) -> list[StageEvent]:
        self._counters.add("refusals_total", labels=("data", code))
        refusal = Refuse(code=code, message=messages.text(message))
        lane = self._outbound.lane_at(arrival.route)
        if lane is not None:
            self._transmitter.say(lane, refusal, now)
        else:
            self._listener.refuse(arrival, self._sent.encode(refusal), now)
        return []


def _last_frames(order: SendChunk) -> tuple[bytes, bytes]:
    """Metadata row and draft frame of a chunk, b"" for those that it has not. Raises ValueError for what they cannot
    hold."""
    last = order.last
    if last is None:
        return b"", b""
    row = metadata.encode(order.ticket, order.generation, last)
    return row, b"" if last.draft is None else draft_frame.encode(order.ticket, order.generation, last.draft)


def _attached_lane(session: OutSession | None, stage: int, attach: Attach) -> Lane | Refuse:
    """The lane that an Attach asks for, or why it is refused. session: the one it names. stage: number in Welcome."""
    if session is None:
        return Refuse(code=messages.NO_SESSION, message="no session of this name is admitted here")
    if attach.stage != stage:
        return Refuse(code=messages.WRONG_STAGE, message=f"stage {stage} here, {attach.stage} asked for")
    lane = session.lanes.get(attach.peer_stage)
    if lane is None:
        text = f"stage {stage} shares no layers and heads with stage {attach.peer_stage} of the peer"
        return Refuse(code=messages.WRONG_STAGE, message=text)
    return lane


def _checksums(lane: Lane, attach: Attach, config: TransferConfig) -> bool:
    """Whether one of the two sides requires checksums."""
    if lane.backend == FAKE or (lane.remote is not None and lane.remote.unchecked):
        return False
    if lane.backend == SHM and lane.remote is not None:
        return config.checksum_shm or attach.checksum_shm
    return config.checksum or attach.checksum != checksum.NONE


def _page_error(order: SendChunk, page_size: int, peer_page_size: int) -> str:
    """How the page lists of an order do not fit its positions; "" when they do. Page sizes are in tokens."""
    needed = pages_for(page_size, order.start, order.count), pages_for(peer_page_size, order.start, order.count)
    given = packed_length(order.pages), packed_length(order.dst_pages)
    return "" if given == needed else f"source and destination pages: {given} given, {needed} needed"
