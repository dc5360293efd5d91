"""The scheduler's event source towards the stages: msgpack messages over their connections."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import (
    AnyOrder,
    BeginEpoch,
    Forward,
    Heartbeat,
    ReplicaOrder,
    ShutdownStage,
    pass_frame,
    stage_identity,
)
from headrace.core.messages.replies import StageDown
from headrace.core.messages.stage_events import (
    AnyStageEvent,
    StageFailed,
    StageHeartbeat,
    StageLoading,
    StageProgress,
    StageReady,
    StageSilence,
)
from headrace.core.runtime.codec import Codec, OrderLog
from headrace.core.runtime.frames import UNSENT_WAIT_S, ConnectionClosed
from headrace.core.runtime.liveness import Limits
from headrace.core.stats import Sample, Stats, join
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch.stage_connections import StageRouter
from headrace.server.launch.stage_silence import FIRST_LOOK_S, NEXT_LOOK_S, Inspect, StageSilences
from headrace.server.stage_group.join_endpoint import JoinEndpoint

log = logging.getLogger(__name__)

ChannelEvent = AnyStageEvent | StageSilence | StageProgress | JoinProgress


class StageChannel:
    """The connections to all stages: sends orders and heartbeats, receives events.

    A stage that could have answered for silence_s and did not is reported as StageFailed, and so is one that was silent
    for hang_s for whatever reason (stage_silence.py). The stage's I/O thread answers heartbeats, so its compute thread
    may be busy for longer; each answer says whether that one has come on. Stages are restarted as a group, with the
    next epoch in their routing ids; after the first StageReady of a group, messages of earlier groups are ignored.

    All stages of a replica receive the same stream of orders, which begins with BeginEpoch when all ranks are ready.
    Orders between the first StageReady and BeginEpoch were decided for the previous group and are discarded. A
    heartbeat carries the count and digest of the stream, which the stage compares with what it received.

    Args:
        router: connections by routing id.
        layout: of the ranks.
        heartbeat_s: interval of heartbeats, in seconds.
        silence_s: time in which a stage could have answered and did not, after which it has failed.
        hang_s: longest silence of a stage that is stopped, busy, or on an overloaded machine; silence_s by default.
        inspect: reads what a local process does.
        join_endpoint: admits external stages; None for stages that this server starts.
    """

    def __init__(
        self,
        router: StageRouter,
        layout: Layout,
        *,
        heartbeat_s: float,
        silence_s: float,
        hang_s: float = 0.0,
        inspect: Inspect = lambda _pid: None,
        join_endpoint: JoinEndpoint | None = None,
    ) -> None:
        self._router = router
        self._layout = layout
        self._join_endpoint = join_endpoint
        self._epoch = 0
        self._group_begun = False
        self._streams = ReplicaStreams(self._layout.dp)
        self._heartbeat_s = heartbeat_s
        self._silences = StageSilences(layout, Limits(silence_s, max(silence_s, hang_s)), inspect)
        self._look_at: float | None = None
        self._ready: dict[int, StageReady] = {}
        self._steps: dict[int, int] = {}  # by rank, as of its latest heartbeat
        self._stats: dict[int, Stats] = {}
        self._experts: dict[int, ExpertLoad] = {}
        self._flush_at: float | None = None
        self._next_heartbeat: float | None = 0.0 if join_endpoint is not None else None
        self._in: Codec[AnyStageEvent] = Codec(AnyStageEvent)
        self._out: Codec[AnyOrder] = Codec(AnyOrder)

    def sockets(self) -> Sequence[Any]:
        """Those of the router."""
        return self._router.sockets()

    def receive(self, now: float) -> Sequence[ChannelEvent]:
        """Events of the current group's stages, and of the join endpoint."""
        events: list[ChannelEvent] = []
        for identity, frames in self._router.receive(now):
            if self._join_endpoint is not None and not self._join_endpoint.is_member(identity):
                events.extend(self._join_endpoint.receive(identity, frames, now))
                continue
            event = self._in.decode(frames[0])
            if isinstance(event, StageLoading):  # of a group that may be the next one
                if event.epoch >= self._epoch:
                    events.append(event)
                continue
            if isinstance(event, StageReady) and event.epoch > self._epoch:
                self._begin_group(event.epoch)
            if identity != self._identity(event.stage):
                continue  # from a group that has ended
            events.extend(self._record(identity, event, now))
            if not isinstance(event, StageHeartbeat):
                events.append(event)
        return events

    def apply(self, command: AnyOrder | ReplicaOrder, now: float) -> Sequence[ChannelEvent]:
        """Send an order to all ranks, or to those of its replica. Returns a StageFailed for each that cannot be
        reached."""
        replicas: Sequence[int] = range(self._layout.dp)
        if isinstance(command, ReplicaOrder):
            replicas, command = (command.replica,), command.order
        if isinstance(command, BeginEpoch):
            self._group_begun = command.epoch == self._epoch
        if not self._group_begun and not isinstance(command, ShutdownStage):
            return ()
        frame = self._out.encode(command)
        self._streams.add(replicas, frame, command)
        ranks = [rank for replica in replicas for rank in self._layout.replica_ranks(replica)]
        failures = [failure for rank in ranks for failure in self._send(rank, frame, command)]
        self._schedule_flush(now)
        return failures

    def tick(self, now: float) -> Sequence[ChannelEvent]:
        """Send heartbeats and unsent messages; returns a StageFailed for each stage that has been silent for too long,
        and a StageSilence for those that are excused."""
        self._router.flush(now)
        self._schedule_flush(now)
        due = self._next_heartbeat
        if due is not None and due <= now:
            return self._heartbeat(due, now)
        return self._look(now) if self._look_at is not None and self._look_at <= now else ()

    def _heartbeat(self, due: float, now: float) -> Sequence[ChannelEvent]:
        events: list[ChannelEvent] = (
            [*self._join_endpoint.tick(self._ready, now)] if self._join_endpoint is not None else []
        )
        self._silences.excuse(now - due, now)  # this process did not run, and could not receive
        events += self._look(now)
        frames = [self._out.encode(self._streams.heartbeat(replica)) for replica in range(self._layout.dp)]
        for stage in self._silences.ranks:
            self._silences.asked(stage, now)
            events.extend(self._send(stage, frames[self._layout.place(stage).replica], None))
        watched = bool(self._silences)
        self._look_at = now + FIRST_LOOK_S if watched else None
        self._next_heartbeat = now + self._heartbeat_s if watched or self._join_endpoint is not None else None
        return events

    def _look(self, now: float) -> Sequence[StageFailed | StageSilence]:
        """Judge the stages that do not answer."""
        events = self._silences.look(now)
        for event in events:
            if isinstance(event, StageFailed):
                self._ready.pop(event.stage, None)
        self._look_at = now + NEXT_LOOK_S if self._silences.waiting else None
        return events

    def next_deadline(self) -> float | None:
        """When the next heartbeat or look, or the next attempt to send or to accept, is due."""
        deadlines = (self._next_heartbeat, self._look_at, self._flush_at, self._router.next_deadline())
        return min((at for at in deadlines if at is not None), default=None)

    def all_ready(self) -> tuple[StageReady, ...]:
        """Every stage's StageReady, in order of their ranks; empty until all stages are ready."""
        return (
            tuple(self._ready[stage] for stage in sorted(self._ready))
            if len(self._ready) == len(self._layout.ranks)
            else ()
        )

    def statistics(self) -> Stats:
        """The stages' counters as of their latest heartbeats, the orders sent to each, and the connections."""
        silences = self._silences.statistics()
        own = [Stats((Sample("orders_total", self._streams.orders), *silences, *self._router.statistics()))]
        joins = [Stats(samples=self._join_endpoint.statistics())] if self._join_endpoint is not None else []
        return join([*own, *joins, *self._stats.values()])

    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """Rows per expert as of the latest heartbeats, of every rank that has experts."""
        return tuple(self._experts.values())

    def stage_down(self, down: StageDown) -> Sequence[ChannelEvent]:
        """A stage has failed: external stages of the group are told to exit, since no supervisor here kills them."""
        if self._join_endpoint is None:
            return ()
        self._begin_group(self._epoch)
        return self._join_endpoint.end_group(f"{self._layout.name(down.stage)} failed: {down.message}")

    def close(self) -> None:
        """Close all connections."""
        self._router.close()

    def _schedule_flush(self, now: float) -> None:
        self._flush_at = now + UNSENT_WAIT_S if self._router.unsent else None

    def _begin_group(self, epoch: int) -> None:
        """Forget the previous group: a new one is starting."""
        self._epoch = epoch
        self._group_begun = False
        self._streams = ReplicaStreams(self._layout.dp)
        self._ready.clear()
        self._silences.clear()
        self._steps.clear()
        self._stats.clear()
        self._experts.clear()

    def _record(self, identity: bytes, event: AnyStageEvent, now: float) -> Sequence[ChannelEvent]:
        """Keep what the stage says of itself. Returns what follows for the scheduler, besides the event."""
        stage, events = event.stage, list[ChannelEvent]()
        if isinstance(event, StageReady):
            self._ready[stage] = event
            self._silences.watch(stage, self._router.pid(identity), now)
        if isinstance(event, StageFailed):
            self._silences.forget(stage)
        elif stage in self._silences:
            events.extend(self._silences.heard(stage, now))
            if self._next_heartbeat is None:
                self._next_heartbeat = now + self._heartbeat_s
        if isinstance(event, StageHeartbeat):
            self._stats[stage] = event.stats
            if event.experts is not None:
                self._experts[stage] = event.experts
            if event.steps != self._steps.get(stage, 0):
                self._steps[stage] = event.steps
                events.append(StageProgress(stage=stage))
        return events

    def _send(self, stage: int, frame: bytes, command: AnyOrder | None) -> Sequence[AnyStageEvent]:
        if stage not in self._silences:
            return ()
        try:
            self._router.send(self._identity(stage), frame)
        except ConnectionClosed as error:
            # The supervisor reports a local stage that has exited, with its exit status. External stages have no
            # supervisor here.
            if isinstance(command, ShutdownStage) or self._join_endpoint is None:
                return ()
            return (self._lost(stage, f"{self._layout.name(stage)} does not take orders: {error}"),)
        return ()

    def _identity(self, stage: int) -> bytes:
        return stage_identity(
            stage, self._epoch, self._join_endpoint.session if self._join_endpoint is not None else ""
        )

    def _lost(self, stage: int, message: str) -> StageFailed:
        log.error("%s", message)
        self._silences.forget(stage)
        self._ready.pop(stage, None)
        return StageFailed(stage=stage, message=message)


class ReplicaStreams:
    """The streams of orders to the replicas of one group, and the passes that lockstep ones have in common: count and
    digest of each, which its ranks compare with their own."""

    def __init__(self, replicas: int) -> None:
        self.orders = 0
        """Orders so far, each counted once."""

        self._logs = [OrderLog() for _ in range(replicas)]
        self._passes = OrderLog()
        self._last_pass = 0  # its number: each replica gets a Forward of it

    def add(self, replicas: Iterable[int], frame: bytes, order: AnyOrder) -> None:
        """Add an order that is sent to these replicas. frame: as encoded."""
        self.orders += 1
        for replica in replicas:
            self._logs[replica].add(frame)
        if isinstance(order, Forward) and order.agreement is not None and order.seq > self._last_pass:
            self._last_pass = order.seq
            self._passes.add(pass_frame(order))

    def heartbeat(self, replica: int) -> Heartbeat:
        """The heartbeat to the ranks of a replica."""
        log, passes = self._logs[replica], self._passes
        pass_digest = passes.digest if passes.count else b""
        return Heartbeat(seq=0, orders=log.count, digest=log.digest, passes=passes.count, pass_digest=pass_digest)
