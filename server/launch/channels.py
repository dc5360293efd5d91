"""The scheduler's ends of the channels to the front end and to the stages: msgpack messages."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from headrace.core.messages.frontend import (
    AnyFrontendRequest,
    AnySchedulerReply,
    ServerInfo,
    Shutdown,
    StageDown,
    StageLost,
    StagePools,
    StatsReply,
)
from headrace.core.messages.membership import Gathering
from headrace.core.messages.orders import (
    AnyOrder,
    AnyStageEvent,
    BeginEpoch,
    Heartbeat,
    ShutdownStage,
    StageFailed,
    StageHeartbeat,
    StageReady,
    stage_identity,
)
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import UNSENT_WAIT_S, FrameSocket, OtherEndGone
from headrace.core.runtime.order_log import OrderLog
from headrace.core.stats import Sample, Stats, join
from headrace.core.types.addresses import url
from headrace.server.launch.stage_connections import Router
from headrace.server.stage_group.join_endpoint import JoinEndpoint

log = logging.getLogger(__name__)


ChannelEvent = AnyStageEvent | Gathering


class StatsSource(Protocol):
    """Anything with counters to add to a snapshot."""

    def statistics(self) -> Stats: ...


class FrontChannel:
    """Frames to and from the front end: a Port of the scheduler's loop.

    Adds ServerInfo, which the scheduler does not know, to what the scheduler says; completes StatsReply with the
    counters of the other ports; turns the supervisor's StageLost into the StageFailed that a silent stage causes too.
    A front end that is gone is a Shutdown.
    """

    def __init__(
        self,
        frames: FrameSocket,
        *,
        instance: str,
        control_port: int,
        on_stage_down: Callable[[StageDown], Sequence[ChannelEvent]],
        stats_sources: Sequence[StatsSource],
    ) -> None:
        self._frames = frames
        self._info = ServerInfo(instance=instance, control_port=control_port)
        self._on_stage_down = on_stage_down
        self._stats_sources = stats_sources
        self._retry_at: float | None = None
        self._in: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
        self._out: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
        self._send(self._info)

    def stages_ready(self, stages: Sequence[StageReady]) -> None:
        """Tell the front end what the stages of a group reported; stages: all of them, in stage order."""
        pools = StagePools(
            fingerprint=stages[0].fingerprint,
            kv_pages=min(stage.kv_pages for stage in stages),
            data_endpoints=tuple(url("tcp", stage.data_host, stage.data_port) for stage in stages),
        )
        self._send(msgspec.structs.replace(self._info, stages=pools))

    def sockets(self) -> Sequence[int]:
        return (self._frames.fileno(),)

    def receive(self, now: float) -> Sequence[AnyFrontendRequest | StageFailed]:
        try:
            messages = [self._in.decode(frame) for frame in self._frames.receive()]
        except OtherEndGone:
            return [Shutdown()]
        return [
            StageFailed(stage=message.stage, message=message.message) if isinstance(message, StageLost) else message
            for message in messages
        ]

    def apply(self, command: AnySchedulerReply, now: float) -> Sequence[ChannelEvent]:
        if isinstance(command, StatsReply):
            stats = join([command.stats, *(source.statistics() for source in self._stats_sources)])
            command = msgspec.structs.replace(command, stats=stats)
        self._send(command)
        self._look_again(now)
        return self._on_stage_down(command) if isinstance(command, StageDown) else ()

    def tick(self, now: float) -> Sequence[AnyFrontendRequest]:
        with suppress(OtherEndGone):
            self._frames.flush()
        self._look_again(now)
        return ()

    def next_deadline(self) -> float | None:
        return self._retry_at

    def close(self) -> None:
        self._frames.close()

    def _send(self, message: AnySchedulerReply) -> None:
        with suppress(OtherEndGone):  # receive() reports it
            self._frames.send(self._out.encode(message))

    def _look_again(self, now: float) -> None:
        self._retry_at = now + UNSENT_WAIT_S if self._frames.unsent else None


class StageChannel:
    """To and from the stage processes: every order to every stage, and a heartbeat.

    A stage that has said nothing for silence_s is reported as StageFailed; its compute thread may be busy for much
    longer, since the heartbeat is answered by the stage's I/O thread. Stages are started again as a group, with the
    next epoch in their names; once one of a group has been heard, its predecessors are not listened to any more.

    All stages of a group get the same stream: it begins with the scheduler's BeginEpoch, for which all of them are
    ready.
    Orders that come before it, once a stage of the group has been heard, were decided for the group before and are
    dropped. Every heartbeat has the stage compare what it got with what was sent.

    gate: what stages that somebody else starts have to pass first.
    """

    def __init__(
        self,
        router: Router,
        stages: int,
        *,
        beat_s: float,
        silence_s: float,
        gate: JoinEndpoint | None = None,
    ) -> None:
        self._router = router
        self._stages = stages
        self._gate = gate
        self._epoch = 0
        self._begun = False
        self._log = OrderLog()
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._ready: dict[int, StageReady] = {}
        self._heard: dict[int, float] = {}  # stages that are ready, and when each spoke last
        self._stats: dict[int, Stats] = {}
        self._retry_at: float | None = None
        self._next_beat: float | None = 0.0 if gate is not None else None
        self._in: Codec[AnyStageEvent] = Codec(AnyStageEvent)
        self._out: Codec[AnyOrder] = Codec(AnyOrder)

    def sockets(self) -> Sequence[Any]:
        return self._router.sockets()

    def receive(self, now: float) -> Sequence[ChannelEvent]:
        events: list[ChannelEvent] = []
        for identity, frames in self._router.receive():
            if self._gate is not None and not self._gate.admitted(identity):
                events.extend(self._gate.receive(identity, frames, now))
                continue
            event = self._in.decode(frames[0])
            if isinstance(event, StageReady) and event.epoch > self._epoch:
                self._begin(event.epoch)
            if identity != self._identity(event.stage):
                continue  # of a group that has ended
            self._note(event, now)
            if not isinstance(event, StageHeartbeat):
                events.append(event)
        return events

    def apply(self, command: AnyOrder, now: float) -> Sequence[ChannelEvent]:
        if isinstance(command, BeginEpoch):
            self._begun = command.epoch == self._epoch
        if not self._begun and not isinstance(command, ShutdownStage):
            return ()
        frame = self._out.encode(command)
        self._log.add(frame)
        failures = [failure for stage in range(self._stages) for failure in self._send(stage, frame, command)]
        self._look_again(now)
        return failures

    def tick(self, now: float) -> Sequence[ChannelEvent]:
        self._router.flush()
        self._look_again(now)
        due = self._next_beat
        return self._beat(due, now) if due is not None and due <= now else ()

    def _beat(self, due: float, now: float) -> Sequence[ChannelEvent]:
        events: list[ChannelEvent] = [*self._gate.tick(self._ready, now)] if self._gate is not None else []
        slept = now - due  # in that time nobody could be heard
        self._heard = {stage: min(now, heard + slept) for stage, heard in self._heard.items()}
        frame = self._out.encode(Heartbeat(seq=0, orders=self._log.count, digest=self._log.digest))
        for stage, heard in list(self._heard.items()):
            if now - heard > self._silence_s:
                events.append(self._lost(stage, f"stage {stage} has been silent for {now - heard:.1f} s"))
            else:
                events.extend(self._send(stage, frame, None))
        self._next_beat = now + self._beat_s if self._heard or self._gate is not None else None
        return events

    def next_deadline(self) -> float | None:
        return min((at for at in (self._next_beat, self._retry_at) if at is not None), default=None)

    def all_ready(self) -> tuple[StageReady, ...]:
        """What the stages said of themselves, in order, once all of them have; else nothing."""
        return tuple(self._ready[stage] for stage in sorted(self._ready)) if len(self._ready) == self._stages else ()

    def statistics(self) -> Stats:
        """The stages' counters as of their last heartbeat, and how many orders they should have had by now."""
        own = [Stats((Sample("orders_total", self._log.count),))]
        gate = [Stats(samples=self._gate.statistics())] if self._gate is not None else []
        return join([*own, *gate, *self._stats.values()])

    def stage_down(self, down: StageDown) -> Sequence[ChannelEvent]:
        """The group is of no use any more. Stages that are not ours to kill are told to end."""
        if self._gate is None:
            return ()
        self._begin(self._epoch)
        return self._gate.dismiss(f"stage {down.stage} failed: {down.message}")

    def close(self) -> None:
        self._router.close()

    def _look_again(self, now: float) -> None:
        self._retry_at = now + UNSENT_WAIT_S if self._router.unsent else None

    def _begin(self, epoch: int) -> None:
        """A new group of stages is coming up."""
        self._epoch = epoch
        self._begun = False
        self._log = OrderLog()
        self._ready.clear()
        self._heard.clear()
        self._stats.clear()

    def _note(self, event: AnyStageEvent, now: float) -> None:
        if isinstance(event, StageReady):
            self._ready[event.stage] = event
        if isinstance(event, StageFailed):
            self._heard.pop(event.stage, None)
        elif isinstance(event, StageReady) or event.stage in self._heard:
            self._heard[event.stage] = now
            if self._next_beat is None:
                self._next_beat = now + self._beat_s
        if isinstance(event, StageHeartbeat):
            self._stats[event.stage] = event.stats

    def _send(self, stage: int, frame: bytes, command: AnyOrder | None) -> Sequence[AnyStageEvent]:
        if stage not in self._heard:
            return ()
        try:
            self._router.send(self._identity(stage), frame)
        except OtherEndGone as error:
            # A child that is gone is silent, too; its supervisor will say so first, and say how it ended. Nobody
            # else watches a stage of another machine.
            if isinstance(command, ShutdownStage) or self._gate is None:
                return ()
            return (self._lost(stage, f"stage {stage} does not take orders: {error}"),)
        return ()

    def _identity(self, stage: int) -> bytes:
        return stage_identity(stage, self._epoch, self._gate.session if self._gate is not None else "")

    def _lost(self, stage: int, message: str) -> StageFailed:
        log.error("%s", message)
        del self._heard[stage]
        self._ready.pop(stage, None)
        return StageFailed(stage=stage, message=message)
