"""The sender of a stage: a Port in its I/O thread that ships computed pages to the peers that attached.

    Send ──► outbound queue ──window──► [header][metadata row][page]...[page] ──► peer ──Ack──► Acked

It owns the data ROUTER; transfer/outbound.py keeps the books. Pages leave without a copy, straight from the pool,
so a page is in use until libzmq has let go of it. A MessageTracker has no file descriptor to wait for, therefore
next_deadline() asks for short re-checks, and only while an Acked or a Quiet waits for one.
"""

from collections.abc import Iterator
from typing import assert_never

from core.arrays import packed_length, unpack
from core.codec import Codec, DecodeError
from core.config import TransferConfig
from core.errors import CANCELLED, PEER_GONE
from core.geometry import Geometry
from core.orders import Acked, AdmitPeer, Cancel, DropPeer, Quiet, Release, Send, SendFailed, StageEvent
from core.stats import Counters, Sample, Stats
from core.trace import Buffer, Outcome, TransferTrace
from transfer import checksum, messages, metadata, sockets
from transfer.layout import PageStore, box_in, copies, frames_of, pages_for
from transfer.messages import Ack, AnswerMessage, Attach, Attached, Chunk, Nack, Ping, Pong, Refuse, StageMessage
from transfer.outbound import Lane, Outbound, OutPart
from transfer.sockets import Context, Socket

SenderOrder = AdmitPeer | DropPeer | Send | Cancel | Release
FIRST_RECHECK_S = 0.001
LAST_RECHECK_S = 0.02


class Sender:
    """A Port of StageEvents and SenderOrders. port: where peers attach. transfers: takes what was answered, while it is
    on. Raises ConfigError when it cannot bind."""

    def __init__(
        self,
        config: TransferConfig,
        *,
        stage: int,
        geometry: Geometry,
        store: PageStore,
        context: Context,
        transfers: Buffer[TransferTrace] | None = None,
    ) -> None:
        self._config = config
        self._stage = stage
        self._geometry = geometry
        self._store = store
        self._outbound = Outbound(geometry)
        self._transfers: Buffer[TransferTrace] = transfers or Buffer(0)
        self._counters = Counters()
        for name in ("bytes_sent_total", "chunks_sent_total"):
            self._counters.add(name, 0)
        self._received: Codec[AnswerMessage] = Codec(AnswerMessage)
        self._sent: Codec[StageMessage] = Codec(StageMessage)
        self._recheck_s = FIRST_RECHECK_S
        self._recheck_at: float | None = None
        # No limit on messages: the window bounds what is queued for a peer, in bytes.
        self._socket, self.port = sockets.bind(
            context,
            config.host,
            config.data_port,
            max_frame=messages.ANSWER_FRAME_BYTES,
            queue=0,
            silence_s=config.peer_timeout_s,
        )

    def sockets(self) -> tuple[Socket, ...]:
        return (self._socket,)

    def receive(self, now: float) -> list[StageEvent]:
        events: list[StageEvent] = []
        for _ in range(sockets.RECEIVE_BATCH):
            frames = sockets.take(self._socket)
            if frames is None:
                break
            events += self._read(frames, now)
        return [*events, *self._settle(now)]

    def apply(self, command: SenderOrder, now: float) -> list[StageEvent]:
        match command:
            case AdmitPeer():
                self._outbound.admit(command)
            case DropPeer():
                self._outbound.drop(command.session)
            case Send():
                return self._send(command, now)
            case Cancel():
                self._outbound.cancel(command.request)
                return self._settle(now)
            case Release():
                self._outbound.release(command.request)
            case _:
                assert_never(command)
        return []

    def tick(self, now: float) -> list[StageEvent]:
        self._recheck_s = min(2 * self._recheck_s, LAST_RECHECK_S)
        return self._settle(now)

    def next_deadline(self) -> float | None:
        return self._recheck_at

    def close(self) -> None:
        self._socket.close()

    def statistics(self) -> Stats:
        gauges = (
            Sample("unacked_bytes", self._outbound.unacked_bytes),
            Sample("queued_chunks", self._outbound.queued_chunks),
        )
        return Stats(samples=(*gauges, *self._counters.snapshot()))

    def unanswered(self, now: float) -> Iterator[TransferTrace]:
        """What is on its way."""
        for lane, part in self._outbound.in_flight():
            yield _traced(lane, part, "open", now)

    def _read(self, frames: list[bytes], now: float) -> list[StageEvent]:
        route, *body = frames
        try:
            if len(body) != 1 or len(body[0]) > messages.ANSWER_FRAME_BYTES:
                raise DecodeError(f"one frame of up to {messages.ANSWER_FRAME_BYTES} bytes was expected")
            message = self._received.decode(body[0])
        except DecodeError as error:
            self._counters.add("malformed_frames_total", labels=("data",))
            return self._refuse(route, messages.BAD_MESSAGE, str(error))
        if isinstance(message, Attach):
            return self._attach(route, message, now)
        lane = self._outbound.lane_at(route)
        if lane is None:
            return self._refuse(route, messages.NO_SESSION, "this connection is not attached to a session")
        match message:
            case Ping():
                self._say(route, Pong(number=message.number))
                return []
            case Ack() | Nack():
                return self._answer(lane, message, now)

    def _attach(self, route: bytes, attach: Attach, now: float) -> list[StageEvent]:
        session = self._outbound.session(attach.session)
        if session is None:
            return self._refuse(route, messages.NO_SESSION, "no session of this name is admitted here")
        if attach.stage != self._stage:
            return self._refuse(route, messages.WRONG_STAGE, f"stage {self._stage} here, {attach.stage} asked for")
        lane = session.lanes.get(attach.peer_stage)
        if lane is None:
            text = f"stage {self._stage} shares no layers and heads with stage {attach.peer_stage} of the peer"
            return self._refuse(route, messages.WRONG_STAGE, text)
        lane.checksum = self._config.checksum or attach.checksum != checksum.NONE
        self._outbound.attach(lane, route)
        self._say(route, Attached(stage=self._stage))
        self._pump(lane, now)
        return []

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
        self._pump(lane, now)
        return events

    def _refused(self, request: int, nack: Nack) -> list[StageEvent]:
        """A peer that has reserved a ticket and does not know it has taken it back: its Cancel, on the other
        connection, is on the way."""
        if nack.code == messages.UNKNOWN_TICKET:
            return self._fail(request, CANCELLED, "the peer has taken the ticket back")
        return self._fail(request, nack.code, nack.message)

    def _send(self, order: Send, now: float) -> list[StageEvent]:
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
        for lane in session.lanes.values():
            self._pump(lane, now)
        return []

    def _note(self, lane: Lane, part: OutPart, outcome: Outcome, now: float) -> None:
        if self._transfers.on:
            self._transfers.add(_traced(lane, part, outcome, now))

    def _fail(self, request: int, code: str, message: str) -> list[StageEvent]:
        """Report a request's failure, once."""
        if not self._outbound.fail(request):
            return []
        return [SendFailed(stage=self._stage, request=request, code=code, message=message)]

    def _pump(self, lane: Lane, now: float) -> None:
        """Put out what the window allows. One lane's pace never holds up another: nothing here waits."""
        while (part := self._outbound.next_part(lane)) is not None:
            part.sent_at = now
            if not self._transmit(lane, part):
                self._outbound.detach(lane)

    def _transmit(self, lane: Lane, part: OutPart) -> bool:
        chunk, order = part.chunk, part.chunk.order
        pages, box = unpack(order.pages), box_in(self._geometry, lane.part)
        cuts = frames_of(copies(self._geometry, lane.destination, order.start, order.count))
        payload = [self._store.read(pages[cut.page], cut.slot, cut.count, box).reshape(-1) for cut in cuts]
        row = [chunk.row] if chunk.row else []
        header = Chunk(
            ticket=order.ticket,
            generation=order.generation,
            chunk=order.chunk,
            start=order.start,
            count=order.count,
            pages=order.dst_pages,
            row=order.dst_row,
            payload_bytes=part.payload_bytes,
            checksum=checksum.of_frames([*row, *payload]) if lane.checksum else None,
            total=order.chunk + 1 if order.last else 0,
        )
        handles = sockets.put_tracked(self._socket, [lane.route or b"", self._sent.encode(header), *row], payload)
        if handles is None:
            return False
        part.handles.extend(handles)
        self._counters.add("bytes_sent_total", part.payload_bytes)
        self._counters.add("chunks_sent_total")
        return True

    def _settle(self, now: float) -> list[StageEvent]:
        acked, quiet = self._outbound.settle()
        if not self._outbound.unsettled:
            self._recheck_s, self._recheck_at = FIRST_RECHECK_S, None
        elif acked or quiet or self._recheck_at is None or self._recheck_at <= now:
            self._recheck_at = now + self._recheck_s
        return [
            *(
                Acked(stage=self._stage, request=chunk.order.request, chunk=chunk.order.chunk, bytes=chunk.bytes)
                for chunk in acked
            ),
            *(Quiet(stage=self._stage, request=request) for request in quiet),
        ]

    def _refuse(self, route: bytes, code: str, message: str) -> list[StageEvent]:
        self._counters.add("refusals_total", labels=("data", code))
        self._say(route, Refuse(code=code, message=messages.text(message)))
        return []

    def _say(self, route: bytes, message: StageMessage) -> None:
        """Best effort: if the connection has closed, the peer asks again on the next one."""
        sockets.put(self._socket, (route, self._sent.encode(message)))


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
