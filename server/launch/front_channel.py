"""The scheduler's event source towards the front end: msgpack messages over a socket."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from headrace.core.messages.frontend import AnyFrontendRequest, StageLost
from headrace.core.messages.replies import (
    AnySchedulerReply,
    RequestTraced,
    ServerInfo,
    StageDown,
    StagePools,
    StatsReply,
    Traced,
)
from headrace.core.messages.stage_events import StageFailed, StageReady
from headrace.core.runtime.codec import Codec
from headrace.core.runtime.frames import UNSENT_WAIT_S, ConnectionClosed, FrameSocket
from headrace.core.stats import Stats, join
from headrace.core.types.kv.geometry import cache_shape, whole_tensors
from headrace.core.types.peers.addresses import usable_url
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.server.launch.stage_channel import ChannelEvent


class StatsSource(Protocol):
    """A part of the scheduler process that has counters."""

    def statistics(self) -> Stats:
        """A snapshot of its counters."""
        ...


class ExpertSource(Protocol):
    """A part of the scheduler process that knows the load of experts."""

    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """Rows per expert, of every rank that has experts."""
        ...


class FrontEndGone(Exception):
    """The front end has ended without Shutdown: it was killed."""


class FrontChannel:
    """Frames to and from the front end: an event source of the scheduler's loop.

    Adds ServerInfo, which the scheduler does not know, to what the scheduler says; completes StatsReply with the
    counters of the other ports; turns the supervisor's StageLost into the StageFailed that a silent stage causes too.
    paused_s: seconds so far in which this process did not run, which its clock leaves out.
    """

    def __init__(
        self,
        frames: FrameSocket,
        *,
        instance: str,
        control_port: int,
        on_stage_down: Callable[[StageDown], Sequence[ChannelEvent]],
        stats_sources: Sequence[StatsSource],
        experts: ExpertSource | None = None,
        paused_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._frames = frames
        self._info = ServerInfo(instance=instance, control_port=control_port)
        self._on_stage_down = on_stage_down
        self._stats_sources = stats_sources
        self._experts = experts
        self._paused_s = paused_s
        self._flush_at: float | None = None
        self._in: Codec[AnyFrontendRequest] = Codec(AnyFrontendRequest)
        self._out: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
        self._send(self._info)

    def stages_ready(self, stages: Sequence[StageReady]) -> None:
        """Tell the front end what the stages of a group reported; stages: all of them, in rank order."""
        offering = [stage for stage in stages if stage.offers is not None]
        pools = StagePools(
            fingerprint=stages[0].fingerprint,
            adapters=stages[0].adapters,
            kv_pages=min(stage.kv_pages for stage in stages),
            data_endpoints=tuple(usable_url("tcp", stage.data_host, stage.data_port) for stage in offering),
            data_ranks=tuple(stage.stage for stage in offering),
            same_bits=None if None in (tried := [stage.same_bits for stage in stages]) else all(tried),
            cache=cache_shape(stage.offers for stage in offering if stage.offers is not None),
            tensors=whole_tensors(stage.geometry for stage in stages),
            computations=tuple(dict.fromkeys(stage.computation for stage in stages if stage.computation is not None)),
            reproducible=all(stage.reproducible for stage in stages),
        )
        self._send(msgspec.structs.replace(self._info, stages=pools))

    def sockets(self) -> Sequence[int]:
        """The connection's file descriptor."""
        return (self._frames.fileno(),)

    def receive(self, now: float) -> Sequence[AnyFrontendRequest | StageFailed]:
        """Requests of the front end. Raises FrontEndGone."""
        try:
            messages = [self._in.decode(frame) for frame in self._frames.receive()]
        except ConnectionClosed as error:
            # No Shutdown: external stages would end as if they had been told to, and not be started again.
            raise FrontEndGone from error
        return [
            StageFailed(stage=message.stage, message=message.message) if isinstance(message, StageLost) else message
            for message in messages
        ]

    def apply(self, command: AnySchedulerReply, now: float) -> Sequence[ChannelEvent]:
        """Send a reply."""
        if isinstance(command, StatsReply):
            stats = join([command.stats, *(source.statistics() for source in self._stats_sources)])
            experts = self._experts.expert_loads() if self._experts is not None else ()
            command = msgspec.structs.replace(command, stats=stats, experts=experts)
        elif isinstance(command, Traced | RequestTraced):
            command = msgspec.structs.replace(command, paused_s=self._paused_s())
        self._send(command)
        self._schedule_flush(now)
        return self._on_stage_down(command) if isinstance(command, StageDown) else ()

    def tick(self, now: float) -> Sequence[AnyFrontendRequest]:
        """Send what the socket's buffer had no room for."""
        with suppress(ConnectionClosed):
            self._frames.flush()
        self._schedule_flush(now)
        return ()

    def next_deadline(self) -> float | None:
        """When unsent messages are offered to the socket again."""
        return self._flush_at

    def close(self) -> None:
        """Close the connection."""
        self._frames.close()

    def _send(self, message: AnySchedulerReply) -> None:
        with suppress(ConnectionClosed):  # receive() reports it
            self._frames.send(self._out.encode(message))

    def _schedule_flush(self, now: float) -> None:
        self._flush_at = now + UNSENT_WAIT_S if self._frames.unsent else None
