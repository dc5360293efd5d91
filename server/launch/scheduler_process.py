"""The scheduler process: `python -m headrace.server.launch.scheduler_process PARENT`, configuration as JSON on
standard input.

Connects the pure scheduler to its event sources: the front end, the stages, the control endpoint (where other servers
fetch KV from this one) and the control clients (where it fetches from others), and the publisher of KV events.
"""

import hashlib
import logging
import platform
import secrets
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import zmq

from headrace.core.config import (
    KvEventsConfig,
    LogFormat,
    RecordingConfig,
    Role,
    SchedulerConfig,
    StageConfig,
    TransferConfig,
)
from headrace.core.messages.stage_events import StageReady
from headrace.core.process_usage import process_usage
from headrace.core.runtime.clock import LoopClock, SystemClock, wall_time
from headrace.core.runtime.frames import FrameSocket, opened
from headrace.core.runtime.liveness import read_activity
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.output import complain
from headrace.core.runtime.process import (
    CONFIGURATION_MISTAKE,
    collect_seldom,
    die_with_parent,
    freeze_loaded,
    leave_signals_to_parent,
    raise_descriptor_limit,
)
from headrace.core.stats import Sample, Stats
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.peers.addresses import everywhere, usable_url
from headrace.core.types.peers.allow_list import allowed_prefills, is_allowed
from headrace.core.version import headrace_version
from headrace.scheduler.loop import SchedulerLoop
from headrace.scheduler.recording.file import Header
from headrace.scheduler.recording.hiding import Hiding, Plain
from headrace.scheduler.recording.recorder import FlightRecorder
from headrace.scheduler.recording.store import RecordingStore
from headrace.scheduler.scheduler import Event, Scheduler
from headrace.server.launch.control_clients import ControlClients
from headrace.server.launch.forecaster import Forecaster
from headrace.server.launch.front_channel import FrontChannel, FrontEndGone, StatsSource
from headrace.server.launch.stage_channel import StageChannel
from headrace.server.launch.stage_connections import FrameRouter, StageRouter, ZmqRouter, bound_port, order_socket
from headrace.server.stage_group.join_endpoint import JoinEndpoint
from headrace.server.stage_group.registry import StageRegistry
from headrace.server.telemetry.kv_event_publisher import KvEventPublisher
from headrace.transfer.control.client import ControlClient
from headrace.transfer.control.server import ControlServer
from headrace.transfer.protocol.matching import BackendOffer, make_hello
from headrace.transfer.protocol.messages import Hello
from headrace.transfer.sockets.connections import Connections

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # at most, between heartbeats of a stage: one that is stopped is noticed after as long


class ExternalStages(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler needs to admit external stages."""

    key: str
    """That they must show; empty: none."""
    template: StageConfig
    """What all of them have in common."""


class SchedulerProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the scheduler process is told when it starts, as JSON on standard input."""

    role: Role
    model: str
    """The name under which the model is served."""
    http_port: int
    front: int
    """File descriptor of its end of the connection to the front end."""
    stage_endpoint: str
    """Where stages connect: the inner end of a door (fd://) for local ones, tcp:// for external ones."""
    scheduler: SchedulerConfig
    transfer: TransferConfig
    external: ExternalStages | None = None
    """None: the server starts its stages itself."""
    kv_events: KvEventsConfig = KvEventsConfig()
    recording: RecordingConfig = RecordingConfig()
    allow_prefill: tuple[str, ...] = ()
    serves_kv: bool = False
    """There is a control endpoint."""
    fetches_kv: bool = False
    """It connects to those of others."""
    log_level: str = "info"
    log_format: LogFormat = "text"


class ProcessStatistics:
    """What this process takes, and the time in which it did not run though it was due."""

    def __init__(self, clock: LoopClock) -> None:
        self._clock = clock

    def statistics(self) -> Stats:
        """For /metrics."""
        paused = Sample("scheduler_paused_seconds_total", self._clock.paused_s)
        return Stats((paused, *process_usage("scheduler")))


def run(config: SchedulerProcessConfig) -> None:
    """Run the scheduler's loop until the front end sends Shutdown.

    Raises ConfigError for an address in use, or a folder that cannot be recorded in, FrontEndGone for a front end that
    was killed.
    """
    store = _recording_store(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    instance = secrets.token_hex(16)
    peer_instance = secrets.token_hex(16) if config.serves_kv else instance  # a secret; the other one is told to all
    control_server = ControlServer(config.transfer, context) if config.serves_kv else None
    may_connect = partial(is_allowed, allowed_prefills((), config.allow_prefill))
    clients = [
        ControlClient(config.transfer, context, may_connect)
        for _ in range(config.scheduler.dp if config.fetches_kv else 0)
    ]
    control_client = ControlClients(clients) if config.fetches_kv else None
    publisher = KvEventPublisher(config.kv_events, context) if config.kv_events.port else None
    scheduler = Scheduler(config.scheduler)
    forecaster = Forecaster(scheduler) if config.scheduler.promise != "off" else None
    clock = LoopClock(SystemClock())
    frames = FrameSocket(socket.socket(fileno=config.front))
    stages = _stage_channel(config, context)
    statistics: list[StatsSource] = [ProcessStatistics(clock), stages]
    statistics += [each for each in (control_server, control_client, publisher, forecaster) if each]
    front = FrontChannel(
        frames,
        instance=instance,
        control_port=control_server.port if control_server else 0,
        on_stage_down=stages.stage_down,
        stats_sources=statistics,
        experts=stages,
        paused_s=lambda: clock.paused_s,
    )

    def introduce(event: Event) -> None:
        """Once every stage is ready, peers may connect: the hello needs the stages' geometries."""
        if isinstance(event, StageReady) and (ready := stages.all_ready()):
            front.stages_ready(ready)
            if control_server is not None:
                control_server.ready(_offer(config, instance, ready))
            if control_client is not None:
                control_client.ready(_hellos(config, peer_instance, ready))

    recorder: FlightRecorder | None = None
    if store is not None:
        recorder = _recorder(config, scheduler, store, clock, front)
        statistics.append(recorder)
    loop = SchedulerLoop(
        recorder or scheduler,
        front=front,
        stages=stages,
        control_server=control_server,
        control_client=control_client,
        publisher=publisher,
        forecaster=forecaster,
        clock=clock,
        observe=introduce,
    )
    freeze_loaded()
    collect_seldom()
    try:
        loop.run()
    except FrontEndGone:
        raise
    except Exception as error:
        if recorder is not None:
            recorder.flush(error)
        raise
    finally:
        for source in (front, stages, control_server, control_client, publisher, forecaster, recorder):
            if source is not None:
                source.close()
        context.term()


def _recording_store(config: SchedulerProcessConfig) -> RecordingStore | None:
    """The folder of recordings, under the server's HTTP port."""
    folder = config.recording.folder
    return RecordingStore(Path(folder).absolute(), str(config.http_port)) if folder else None


def _recorder(
    config: SchedulerProcessConfig, scheduler: Scheduler, store: RecordingStore, clock: LoopClock, front: FrontChannel
) -> FlightRecorder:
    hidden = not config.recording.tokens
    own = config.scheduler
    header = Header(
        version=headrace_version(),
        python=platform.python_version(),
        config=own,
        hidden=hidden,
        wall_offset_s=wall_time() - clock.now(),
        server=f"{config.role} server {socket.gethostname()}:{config.http_port}",
    )
    return FlightRecorder(
        scheduler,
        store,
        header,
        Hiding(secrets.token_bytes(32), own.vocab_size, own.page_size) if hidden else Plain(),
        keep_s=60.0 * config.recording.minutes,
        clock=clock.now,
        wall=wall_time,
        reply=lambda reply: front.apply(reply, clock.now()),
    )


def _stage_channel(config: SchedulerProcessConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> StageChannel:
    """The channel to local stages through a door, or to external ones over TCP with a join endpoint."""
    silence_s = config.transfer.peer_timeout_s
    external = config.external
    join_endpoint: JoinEndpoint | None = None
    router: StageRouter
    if external is None:
        router = FrameRouter(opened(config.stage_endpoint))
    else:
        connections = Connections(
            context, "stages", has_session=lambda route: join_endpoint is not None and join_endpoint.is_known(route)
        )
        socket = order_socket(context, config.stage_endpoint, connections.watch, silence_s)
        router = ZmqRouter(socket, connections)
        host = config.stage_endpoint.removeprefix("tcp://").rpartition(":")[0]
        registry = StageRegistry(
            external.template,
            key=external.key,
            version=headrace_version(),
            endpoint=f"{usable_url('tcp', host, bound_port(socket))}{everywhere(host)}",
            control_host=config.transfer.host if config.serves_kv else None,
            new_session=partial(secrets.token_hex, 16),
        )
        join_endpoint = JoinEndpoint(socket, registry, config.scheduler.start_timeout_s)
    return StageChannel(
        router,
        config.scheduler.layout,
        heartbeat_s=min(silence_s / 3, HEARTBEAT_S),
        silence_s=silence_s,
        hang_s=config.scheduler.stage_timeout_s,
        inspect=read_activity,
        join_endpoint=join_endpoint,
    )


def _offer(config: SchedulerProcessConfig, instance: str, stages: Sequence[StageReady]) -> BackendOffer:
    """What the control endpoint offers to decode peers."""
    offered = [(stage, geometry) for stage in stages if (geometry := stage.offers) is not None]
    hosts = (stage.data_host for stage, _ in offered)
    layout = config.scheduler.layout
    return BackendOffer(
        instance=instance,
        fingerprint=stages[0].fingerprint,
        geometries=tuple(geometry for _, geometry in offered),
        data_ports=tuple(stage.data_port for stage, _ in offered),
        data_hosts=tuple("" if host == config.transfer.host else host for host in hosts),
        max_model_len=config.scheduler.max_model_len,
        backends=_backends(config, stages, config.role == "prefill"),
        shared_memory=frozenset(stage.host for stage in stages),
        nixl=frozenset(stage.nixl for stage in stages),
        unreachable_gpus=frozenset(gpu for stage in stages for gpu in stage.unreachable_gpus),
        replicas=tuple(layout.place(stage.stage).replica for stage, _ in offered) if layout.dp > 1 else (),
        model=config.model,
    )


def _hellos(config: SchedulerProcessConfig, instance: str, stages: Sequence[StageReady]) -> list[Hello]:
    """One for each data-parallel replica, which is a peer of its own: the pages that it reserves are in its pool."""
    layout = config.scheduler.layout
    parts = [[one for one in stages if layout.place(one.stage).replica == replica] for replica in range(layout.dp)]
    if layout.dp == 1:
        return [_hello(config, instance, stages)]
    return [
        _hello(config, hashlib.sha256(f"{instance} {replica}".encode()).hexdigest()[:32], part)
        for replica, part in enumerate(parts)
    ]


def _hello(config: SchedulerProcessConfig, instance: str, stages: Sequence[StageReady]) -> Hello:
    """What the control client sends to the control endpoints of prefill servers."""
    return make_hello(
        config.transfer,
        instance=instance,
        name=f"{socket.gethostname()}:{config.http_port}",
        role=config.role,
        fingerprint=stages[0].fingerprint,
        geometries=tuple(stage.geometry for stage in stages),
        kv_pages=min(stage.kv_pages for stage in stages),
        max_model_len=config.scheduler.max_model_len,
        metadata_rows=config.scheduler.metadata_rows,
        backends=_backends(config, stages, config.role == "decode"),
        memory=tuple(stage.memory for stage in stages if stage.memory is not None),
        model=config.model,
    )


def _backends(config: SchedulerProcessConfig, stages: Sequence[StageReady], main: bool) -> tuple[str, ...]:
    """Transfer backends that work at every stage, in the configured order. main: KV goes the way that the role says,
    for which the stages have set up their memory; the other way it moves in frames."""
    if not main:
        return (ZMQ,)
    return tuple(name for name in config.transfer.backends if all(name in stage.backends for stage in stages))


def main() -> int:
    """Entry point of the child process. Returns the exit status."""
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_parent()
    raise_descriptor_limit()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=SchedulerProcessConfig)
    configure_logging(config.log_level, "scheduler", config.log_format)
    try:
        run(config)
    except ConfigError as error:
        complain(error)
        return CONFIGURATION_MISTAKE
    except FrontEndGone:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
