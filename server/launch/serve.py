"""`headrace serve`: one server from start to exit status.

    this process            children
    ┌────────────────┐      ┌──────────────────┐      ┌─────────┐   ┌─────────┐
    │ HTTP + app     │      │ scheduler        │      │ stage 0 │──►│ stage 1 │ …
    │ supervisor     │◄────►│ control endpoint │◄────►│ KV pool │   │ KV pool │
    └────────────────┘      └──────────────────┘      └─────────┘   └─────────┘

Shutdown, on SIGTERM, Ctrl-C or SIGHUP (server/launch/stop_signals.py):

    first signal    /ready fails; requests are accepted for another --drain-grace
        │
        ▼           requests are refused; open ones go on for --drain-timeout at most
    drained, or time is up, or a second signal
        │
        ▼           what is open fails with 503, streams with an error event, at peers, too
    the HTTP server closes; scheduler and stages are told to exit, and killed if they do not
"""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.core.config import Config, EngineConfig, StageConfig
from headrace.core.runtime.background import first_of
from headrace.core.runtime.frames import DOOR, FrameSocket, make_door
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.output import say
from headrace.core.runtime.private_folder import remove_abandoned
from headrace.core.runtime.process import (
    freeze_loaded,
    limit_integers,
    raise_descriptor_limit,
)
from headrace.core.types.peers.addresses import host_port, is_loopback, url
from headrace.core.version import headrace_version
from headrace.engine.device import own_device
from headrace.server.config.gateway import gateway_of
from headrace.server.config.load import CPUINFO_VARIABLE
from headrace.server.frontend import request_log
from headrace.server.http.listeners import HttpListeners
from headrace.server.launch.child_process import Child, GatewayChild, StartFailed
from headrace.server.launch.free_port import free_port
from headrace.server.launch.scheduler_process import ExternalStages, SchedulerProcessConfig
from headrace.server.launch.stop_signals import StopSignals
from headrace.server.launch.supervisor import Supervisor
from headrace.transfer.backends.writer_locks import sweep

if TYPE_CHECKING:
    from headrace.server.launch.frontend_process import FrontEnd

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
FIRST_COST_TOKENS = 256


def serve(config: Config, memory: Sequence[str]) -> int:
    """Run a server with a resolved configuration until a signal. Returns the exit status. memory: how that of each rank
    is divided, in words.

    Raises ConfigError for an HTTP port that cannot be bound.
    """
    configure_logging(config.server.log_level, "front end", config.server.log_format, unlimited={request_log.__name__})
    logging.getLogger("httpx").setLevel(logging.WARNING)
    raise_descriptor_limit()
    if config.engine.cpuinfo != EngineConfig().cpuinfo:
        log.warning("%s: this CPU is taken for the one of %s", CPUINFO_VARIABLE, config.engine.cpuinfo)
    limit_integers()
    remove_abandoned()
    stop = StopSignals()
    try:
        with closing(HttpListeners(config)) as listeners:  # before a child starts: they take seconds
            port = listeners.main[0].getsockname()[1]  # where 0 stood for a free one
            config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, port=port))
            return asyncio.run(_until_stopped(config, memory, listeners, stop))
    finally:
        sweep()  # pools in shared memory of stages that had to be killed


async def _until_stopped(config: Config, memory: Sequence[str], listeners: HttpListeners, stop: StopSignals) -> int:
    with stop.attached():
        return await _serve(config, memory, listeners, stop)


async def _serve(config: Config, memory: Sequence[str], listeners: HttpListeners, stop: StopSignals) -> int:
    ours, theirs = socket.socketpair()
    inner, outer = make_door()
    found = gateway_of(config)
    gateway = None if found is None else GatewayChild(found)
    external = config.group.start == "external"
    supervisor = Supervisor(
        _scheduler(config, theirs, inner),
        None if external else partial(_stages, config, outer),
        config.scheduler.start_timeout_s,
        config.scheduler.layout,
        config.group.member,
    )
    started = time.monotonic()
    say(_beginning(config, memory))
    try:
        await supervisor.start()
    except StartFailed as error:
        log.error("%s", error)
        return 1
    theirs.close()
    inner.close()
    # Most of what this process loads, while the children load theirs:
    from headrace.server.launch.frontend_process import FrontEnd

    front = FrontEnd(config, FrameSocket(ours), listeners, supervisor, memory)
    service = front.service
    supervisor.watch(service.stage_lost)
    if config.recording.folder:
        stop.on_record = service.record_by_signal
    if gateway is not None:
        gateway.start()
    http = asyncio.ensure_future(front.serve())
    served = stopped = False
    try:
        await service.start()
        freeze_loaded()
        status = [front.print_engine_status()] if external else []
        over = asyncio.ensure_future(first_of(stop.first.wait(), supervisor.fatal, http, *status))
        await first_of(over, service.readiness.wait_engine_ready())
        if not over.done():
            served = True
            await first_of(over, front.announce(started))
            await over
        stopped = stop.first.is_set()
        if stopped:
            stop.say_draining()
            await first_of(_drained(front, gateway), stop.second.wait(), supervisor.fatal)
    finally:
        if gateway is not None:
            await gateway.kill()
        await service.end_requests()
        await front.end(http)
        service.shut_down()
        await supervisor.end(stop.second)
        await service.stop()
    if stopped and not (served and supervisor.fatal.done()):
        return stop.status  # a scheduler that has not started may have ended by the same signal
    return supervisor.fatal.result() if supervisor.fatal.done() else 1


async def _drained(front: "FrontEnd", gateway: GatewayChild | None) -> None:
    """Drain the gateway, whose prompts are computed here, and then this server."""
    if gateway is not None:
        await gateway.drain()
    await front.drain()


def _beginning(config: Config, memory: Sequence[str]) -> str:
    """What is started, before anything of it is."""
    server, model, threads = config.server, config.model, config.engine.threads
    each = " for each stage" if len(config.scheduler.layout.ranks) > 1 else ""
    computed = f"{model.dtype}, {model.device}" + (f", {threads} thread{'s' * (threads > 1)}{each}" if threads else "")
    first = f"Headrace {headrace_version()}: loading {config.model_name} ({computed}) for a {server.role} server"
    return "\n".join([first, *(f"  {line}" for line in memory)])


def _tcp(host: str, port: int) -> str:
    """An endpoint to bind; port 0: a free one."""
    return url("tcp", host, port or "*")


def _scheduler(config: Config, front: socket.socket, door: socket.socket) -> Child:
    external: ExternalStages | None = None
    stage_endpoint, descriptors = f"{DOOR}{door.fileno()}", [front.fileno(), door.fileno()]
    if config.group.start == "external":
        external = ExternalStages(key=config.group.key, template=_template(config))
        stage_endpoint, descriptors = _tcp(config.group.host, config.group.port), [front.fileno()]
    scheduler = SchedulerProcessConfig(
        role=config.server.role,
        model=config.model_name,
        http_port=config.server.port,
        front=front.fileno(),
        stage_endpoint=stage_endpoint,
        scheduler=config.scheduler,
        transfer=config.transfer,
        external=external,
        kv_events=config.kv_events,
        recording=config.recording,
        allow_prefill=(*config.server.allow_prefill, *config.server.accept_returns),
        serves_kv=config.server.serves_kv,
        fetches_kv=config.server.fetches_kv,
        log_level=config.server.log_level,
        log_format=config.server.log_format,
    )
    return Child("headrace.server.launch.scheduler_process", scheduler, threads=1, descriptors=descriptors)


def _stages(config: Config, door: socket.socket, epoch: int) -> list[Child]:
    """The processes of all ranks for one start of the group, with a rendezvous port of their own."""
    ranks, member = config.scheduler.layout.ranks, config.group.member
    rendezvous = host_port(LOOPBACK, free_port())
    group = {"WORLD_SIZE": str(len(ranks))}
    if sys.platform == "linux" and (member is None or is_loopback(member.host)):
        group["GLOO_SOCKET_IFNAME"] = "lo"  # local stages connect to each other over loopback only
    caches = {}
    if config.server.cache_dir:
        caches["TRITON_CACHE_DIR"] = str(Path(config.server.cache_dir).absolute() / "compiled")
    return [
        Child(
            "headrace.engine.stage",
            _stage(config, f"{DOOR}{door.fileno()}", rendezvous, rank, epoch),
            threads=config.engine.threads,
            descriptors=(door.fileno(),),
            environment={**caches, **group, "RANK": str(rank)} if len(ranks) > 1 or member is not None else caches,
        )
        for rank in ranks
    ]


def _stage(config: Config, endpoint: str, rendezvous: str, rank: int, epoch: int) -> StageConfig:
    transfer, model = config.transfer, config.model
    if transfer.data_port:
        transfer = msgspec.structs.replace(transfer, data_port=transfer.data_port + rank)
    if model.device == "cuda" and len(config.scheduler.layout.ranks) > 1:
        model = msgspec.structs.replace(model, device=own_device(model.device, rank))
    return msgspec.structs.replace(
        _template(config),
        rank=rank,
        epoch=epoch,
        rendezvous=rendezvous,
        endpoint=endpoint,
        model=model,
        transfer=transfer,
    )


def _template(config: Config) -> StageConfig:
    """The configuration that all ranks have in common."""
    return StageConfig(
        rank=0,
        layout=config.scheduler.layout,
        endpoint="",
        model=config.model,
        engine=config.engine,
        transfer=config.transfer,
        credits=config.scheduler.credits,
        stage_timeout_s=config.scheduler.stage_timeout_s,
        measure_tokens=_measured_tokens(config),
        log_level=config.server.log_level,
        log_format=config.server.log_format,
        role=config.server.role,
        member=config.group.member,
        rules=config.scheduler.rules,
        dp_sync=config.group.dp_sync,
        links=config.group.links,
    )


def _measured_tokens(config: Config) -> int:
    """Length of the chunks by which stages measure what computing costs before they serve; 0: they do not. A decode
    server that compares costs may have no other occasion; short ones do, as what it computes then corrects them."""
    if config.scheduler.chunking == "dynamic":
        return config.scheduler.chunk_tokens
    if (config.server.role, config.server.remote) == ("decode", "cost"):
        return min(config.scheduler.chunk_tokens, FIRST_COST_TOKENS)
    return 0
