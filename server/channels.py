"""The scheduler's ends of the channels to the front end and to the stages (ZMQ over local sockets, msgpack)."""

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec
import zmq

from core.codec import Codec
from core.intake import EngineState, IntakeMessage, OutputMessage, StageLost, StatsReply
from core.order_log import OrderLog
from core.orders import (
    Beat,
    Begin,
    Halt,
    OrderMessage,
    StageBeat,
    StageFailed,
    StageMessage,
    StageReady,
    stage_identity,
)
from core.stats import Sample, Stats, join

log = logging.getLogger(__name__)

BATCH = 256  # messages taken in one pass, so that one busy channel cannot starve the others
HIGH_WATER = 100_000  # both ends are ours and bounded by credits; reaching this means the other end is dead


class StatsSource(Protocol):
    """Anything with counters to add to a snapshot."""

    def statistics(self) -> Stats: ...


class FrontChannel:
    """PAIR socket to the front end. Completes EngineState with who and where we are, StatsReply with the counters
    of the other ports; turns the supervisor's StageLost into the event that a silent stage causes too."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, desk_port: int, instance: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.linger = 1000
        self._socket.bind(endpoint)
        self._desk_port = desk_port
        self._instance = instance
        self.stages: tuple[StageReady, ...] = ()
        self._in: Codec[IntakeMessage] = Codec(IntakeMessage)
        self._out: Codec[OutputMessage] = Codec(OutputMessage)
        self.more_stats: list[StatsSource] = []

    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return (self._socket,)

    def receive(self, now: float) -> Sequence[IntakeMessage | StageFailed]:
        messages = (self._in.decode(frame) for frame in _drain(self._socket))
        return [
            StageFailed(stage=message.stage, message=message.message) if isinstance(message, StageLost) else message
            for message in messages
        ]

    def apply(self, command: OutputMessage, now: float) -> Sequence[IntakeMessage]:
        if isinstance(command, EngineState):
            command = msgspec.structs.replace(
                command,
                desk_port=self._desk_port,
                data_ports=tuple(stage.data_port for stage in self.stages),
                instance=self._instance,
                fingerprint=self.stages[0].fingerprint if self.stages else "",
            )
        elif isinstance(command, StatsReply):
            command = msgspec.structs.replace(
                command, stats=join([command.stats, *(source.statistics() for source in self.more_stats)])
            )
        self._socket.send(self._out.encode(command), zmq.NOBLOCK)
        return ()

    def tick(self, now: float) -> Sequence[IntakeMessage]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def close(self) -> None:
        self._socket.close()


class StageChannel:
    """ROUTER socket to the stage processes: every order to every stage, and a heartbeat.

    A stage that has said nothing for silence_s is reported as StageFailed; its compute thread may be busy for much
    longer, since the heartbeat is answered by the stage's I/O thread. Stages are started again as a group, with the
    next epoch in their names; once one of a group has been heard, its predecessors are not listened to any more.

    All stages of a group get the same stream: it begins with the scheduler's Begin, for which all of them are ready.
    Orders that come before it, once a stage of the group has been heard, were decided for the group before and are
    dropped. Every heartbeat has the stage compare what it got with what was sent.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, stages: int, *, beat_s: float, silence_s: float
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(HIGH_WATER)
        self._socket.linger = 1000
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a restarted stage takes its predecessor's place
        self._socket.bind(endpoint)
        self._stages = stages
        self._epoch = 0
        self._begun = False
        self._log = OrderLog()
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._ready: dict[int, StageReady] = {}
        self._heard: dict[int, float] = {}  # stages that are ready, and when each spoke last
        self._stats: dict[int, Stats] = {}
        self._next_beat: float | None = None
        self._in: Codec[StageMessage] = Codec(StageMessage)
        self._out: Codec[OrderMessage] = Codec(OrderMessage)

    def sockets(self) -> Sequence["zmq.Socket[bytes]"]:
        return (self._socket,)

    def receive(self, now: float) -> Sequence[StageMessage]:
        events: list[StageMessage] = []
        for _ in range(BATCH):
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            event = self._in.decode(frame)
            if isinstance(event, StageReady) and event.epoch > self._epoch:
                self._begin(event.epoch)
            if identity != stage_identity(event.stage, self._epoch):
                continue  # of a group that has ended
            self._note(event, now)
            if not isinstance(event, StageBeat):
                events.append(event)
        return events

    def apply(self, command: OrderMessage, now: float) -> Sequence[StageMessage]:
        if isinstance(command, Begin):
            self._begun = command.epoch == self._epoch
        if not self._begun and not isinstance(command, Halt):
            return ()
        frame = self._out.encode(command)
        self._log.add(frame)
        return [failure for stage in range(self._stages) for failure in self._send(stage, frame, command)]

    def tick(self, now: float) -> Sequence[StageMessage]:
        events: list[StageMessage] = []
        frame = self._out.encode(Beat(seq=0, orders=self._log.count, digest=self._log.digest))
        for stage, heard in list(self._heard.items()):
            if now - heard > self._silence_s:
                events.append(self._lost(stage, f"stage {stage} has been silent for {now - heard:.1f} s"))
            else:
                events.extend(self._send(stage, frame, None))
        self._next_beat = now + self._beat_s if self._heard else None
        return events

    def next_deadline(self) -> float | None:
        return self._next_beat

    def all_ready(self) -> tuple[StageReady, ...]:
        """What the stages said of themselves, in order, once all of them have; else nothing."""
        return tuple(self._ready[stage] for stage in sorted(self._ready)) if len(self._ready) == self._stages else ()

    def statistics(self) -> Stats:
        """The stages' counters as of their last heartbeat, and how many orders they should have had by now."""
        return join([Stats((Sample("orders_total", self._log.count),)), *self._stats.values()])

    def close(self) -> None:
        self._socket.close()

    def _begin(self, epoch: int) -> None:
        """A new group of stages is coming up."""
        self._epoch = epoch
        self._begun = False
        self._log = OrderLog()
        self._ready.clear()
        self._heard.clear()
        self._stats.clear()

    def _note(self, event: StageMessage, now: float) -> None:
        if isinstance(event, StageReady):
            self._ready[event.stage] = event
        if isinstance(event, StageFailed):
            self._heard.pop(event.stage, None)
        elif isinstance(event, StageReady) or event.stage in self._heard:
            self._heard[event.stage] = now
            if self._next_beat is None:
                self._next_beat = now + self._beat_s
        if isinstance(event, StageBeat):
            self._stats[event.stage] = event.stats

    def _send(self, stage: int, frame: bytes, command: OrderMessage | None) -> Sequence[StageMessage]:
        if stage not in self._heard:
            return ()
        try:
            self._socket.send_multipart((stage_identity(stage, self._epoch), frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # A process that is gone is silent, too; whoever watches it will say so first, and say how it ended.
            if error.errno == zmq.EHOSTUNREACH or isinstance(command, Halt):
                return ()
            return (self._lost(stage, f"stage {stage} does not take orders: {error.strerror}"),)
        return ()

    def _lost(self, stage: int, message: str) -> StageFailed:
        log.error("%s", message)
        del self._heard[stage]
        self._ready.pop(stage, None)
        return StageFailed(stage=stage, message=message)


def _drain(socket: "zmq.Socket[bytes]") -> list[bytes]:
    frames: list[bytes] = []
    for _ in range(BATCH):
        try:
            frames.append(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            break
    return frames
