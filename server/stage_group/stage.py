"""`headrace stage`: one pipeline stage that somebody else has started, for a scheduler given by its address.

    find its place ──► join the scheduler ──► told everything ──► load, meet the other stages, compute (engine/stage.py)
                          (main thread)                             membership kept up by a thread of its own

The process takes part in one start of the group and ends with it: whoever has started it starts it again.
"""

import argparse
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from headrace.core.config import STAGE_KEY_VARIABLE, StageConfig
from headrace.core.messages.membership import JoinRequest
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.process import die_with_parent
from headrace.core.types.errors import ConfigError
from headrace.engine.device import own_device
from headrace.engine.parallel.pipeline import LinkBroken
from headrace.engine.stage import run
from headrace.server.stage_group.join_client import JoinClient, NotAdmitted
from headrace.server.stage_group.rank_info import RankInfo, find_place
from headrace.server.version import headrace_version

log = logging.getLogger(__name__)


def main(given: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run one stage to its end. Returns the exit status. Raises ConfigError."""
    place = find_place(vars(given), environ)
    endpoint = _endpoint(given.scheduler)
    if place.launched:
        die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends it at once: there is nothing to save
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s %(levelname)s stage {place.rank}: %(message)s")
    member = JoinClient(endpoint, _join(given, environ, place), given.join_timeout, SystemClock())
    log.info("joining %s as stage %d of %d", endpoint, place.rank, place.world_size)
    try:
        config = member.join()
        logging.getLogger().setLevel(config.log_level.upper())
        member.keep()
        return run(_completed(config, endpoint, place))
    except NotAdmitted as error:
        print(f"headrace: {error}", file=sys.stderr)
        return error.end.status
    except LinkBroken as error:
        log.error("%s", error)
        return 1


def _endpoint(given: str) -> str:
    parts = urlsplit(given)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or not port or parts.path:
        raise ConfigError(f"--scheduler: expected tcp://HOST:PORT, which headrace serve prints, got {given!r}")
    return given


def _join(given: argparse.Namespace, environ: Mapping[str, str], place: RankInfo) -> JoinRequest:
    return JoinRequest(
        rank=place.rank,
        world_size=place.world_size,
        incarnation=secrets.token_hex(16),
        version=headrace_version(),
        host=given.transfer_host,
        data_port=given.data_port + place.local_rank if given.data_port else 0,
        key=given.stage_key or environ.get(STAGE_KEY_VARIABLE, "").strip(),
    )


def _completed(config: StageConfig, endpoint: str, place: RankInfo) -> StageConfig:
    """What the scheduler has told, and what only this machine knows."""
    engine, model = config.engine, config.model
    threads = engine.threads or max(1, len(os.sched_getaffinity(0)) // place.local_world_size)
    return msgspec.structs.replace(
        config,
        endpoint=endpoint,
        rendezvous=place.rendezvous,
        rendezvous_hosted=place.rendezvous_hosted,
        engine=msgspec.structs.replace(engine, threads=threads),
        model=msgspec.structs.replace(model, device=own_device(model.device, place.local_rank)),
    )
