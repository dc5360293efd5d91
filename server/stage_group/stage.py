"""`headrace stage`: an external pipeline stage, started by torchrun, Slurm, Kubernetes or by hand.

    read rank and rendezvous ──► join the scheduler ──► StageConfig ──► load, rendezvous, compute (engine/stage.py)
                                    (main thread)                         heartbeats to the scheduler (own thread)

The process takes part in one start of the group and exits with it; its launcher starts it again.
"""

import argparse
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from headrace.core.config import STAGE_KEY_VARIABLE, StageConfig
from headrace.core.messages.membership import JoinRequest
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.cpu import usable_cores
from headrace.core.runtime.logs import configure_logging
from headrace.core.runtime.output import complain, exit_now
from headrace.core.runtime.process import die_with_parent, raise_descriptor_limit
from headrace.core.runtime.signals import INTERRUPTED_BY, ending, meaningless, signal_name
from headrace.core.types.errors import ConfigError
from headrace.core.version import headrace_version
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.device import own_device
from headrace.engine.stage import run
from headrace.server.config.load import find_cpuinfo
from headrace.server.stage_group.join_client import JoinClient, MembershipOver
from headrace.server.stage_group.rank_info import RankInfo, read_rank_info

log = logging.getLogger(__name__)


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one stage until its group ends. Returns the exit status. Raises ConfigError for wrong flags or variables."""
    info = read_rank_info(vars(given), environ)
    endpoint = _endpoint(given.scheduler)
    cpuinfo = find_cpuinfo(environ)
    if info.under_launcher:
        die_with_parent(os.getppid())
    raise_descriptor_limit()
    configure_logging("info", f"rank {info.rank}")
    _heed_signals()
    client = JoinClient(endpoint, _join_request(given, environ, info), given.join_timeout, SystemClock())
    log.info("joining %s as rank %d of %d", endpoint, info.rank, info.world_size)
    try:
        config = client.join()
        configure_logging(config.log_level, f"rank {info.rank}", config.log_format)
        client.start_heartbeat()
        return run(_complete(config, cpuinfo, endpoint, info))
    except MembershipOver as error:
        complain(error)
        return error.end.status
    except LinkBroken as error:
        log.error("%s", error)
        return 1


def _heed_signals() -> None:
    """Have a thread end the process at once when a signal asks for that: there is nothing to save. The main thread may
    be in a library for minutes, and Python's handlers wait for it; the byte that the interpreter writes does not."""
    told, tells = socket.socketpair()
    tells.setblocking(False)
    signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    ends = ending()
    for number in (*ends, *meaningless()):
        signal.signal(number, lambda _number, _frame: None)

    def heed(_open: socket.socket) -> None:
        while (number := told.recv(1)[0]) not in ends:
            log.info("%s changes nothing here", signal_name(number))
        log.warning("%s ends this rank", signal_name(number))
        exit_now(INTERRUPTED_BY + number)

    threading.Thread(target=heed, args=(tells,), name="signals", daemon=True).start()


def _endpoint(given: str) -> str:
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port or parts.path:
        raise ConfigError(f"--scheduler: expected tcp://HOST:PORT, which headrace serve prints, got {given!r}")
    return given


def _join_request(given: argparse.Namespace, environ: Mapping[str, str], info: RankInfo) -> JoinRequest:
    return JoinRequest(
        rank=info.rank,
        world_size=info.world_size,
        incarnation=secrets.token_hex(16),
        version=headrace_version(),
        host=given.transfer_host,
        data_port=given.data_port + info.local_rank if given.data_port else 0,
        key=given.stage_key or environ.get(STAGE_KEY_VARIABLE, "").strip(),
    )


def _complete(config: StageConfig, cpuinfo: str, endpoint: str, info: RankInfo) -> StageConfig:
    """The scheduler's configuration, with what only this machine knows."""
    engine, model = config.engine, config.model
    threads = engine.threads or max(1, usable_cores() // info.local_world_size)
    return msgspec.structs.replace(
        config,
        endpoint=endpoint,
        rendezvous=info.rendezvous,
        rendezvous_hosted=info.rendezvous_hosted,
        engine=msgspec.structs.replace(engine, threads=threads, cpuinfo=cpuinfo),
        model=msgspec.structs.replace(model, device=own_device(model.device, info.local_rank)),
    )
