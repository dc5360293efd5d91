"""A stage's place among its peers: from flags, or from what torchrun, Slurm and LeaderWorkerSets tell processes."""

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.config import TransferConfig
from headrace.core.types.addresses import host_port
from headrace.core.types.errors import ConfigError

MASTER_PORT = 29500  # where torch's own launchers put it


JOIN_TIMEOUT_S = 600.0

FLAGS: dict[str, dict[str, Any]] = {
    "scheduler": {"required": True, "metavar": "tcp://HOST:PORT", "help": "where headrace serve says to join"},
    "rank": {"type": int, "metavar": "N", "help": "which stage this is (default: as the launcher says)"},
    "world-size": {"type": int, "metavar": "N", "help": "number of stages (default: as the launcher says)"},
    "local-rank": {"type": int, "metavar": "N", "help": "which one of this machine's (default: as the launcher says)"},
    "master": {"metavar": "HOST:PORT", "help": "where the stages meet, at stage 0 (default: as the launcher says)"},
    "transfer-host": {
        "default": TransferConfig().host,
        "metavar": "ADDRESS",
        "help": "address of this machine where decode servers reach this stage (default: %(default)s)",
    },
    "data-port": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "port there, plus the local rank; 0: as headrace serve says, or a free one (default: 0)",
    },
    "stage-key": {"metavar": "TEXT", "help": "key of the scheduler; also HEADRACE_STAGE_KEY"},
    "join-timeout": {
        "type": float,
        "default": JOIN_TIMEOUT_S,
        "metavar": "SECONDS",
        "help": "how long to wait for the scheduler and the other stages (default: %(default)g)",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of `headrace stage`. All that stages have in common is configured at the scheduler."""
    for name, options in FLAGS.items():
        parser.add_argument(f"--{name}", **options)


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """rank of world_size, and local_rank of local_world_size on this machine. rendezvous: HOST:PORT where the stages
    meet. rendezvous_hosted: a launcher's agent listens there, else rank 0 does. launched: by an agent that is this
    process's parent and whose end has to be its own."""

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    rendezvous: str = ""
    rendezvous_hosted: bool = False
    launched: bool = False


def find_place(flags: Mapping[str, Any], environ: Mapping[str, str]) -> RankInfo:
    """Flags rank, world_size, local_rank and master (HOST:PORT; None: not given) go before the environment.

    Raises ConfigError when they do not tell the place.
    """
    found = _environment(environ)
    found |= {name: flags[name] for name in ("rank", "world_size", "local_rank") if flags[name] is not None}
    if flags["master"] is not None:
        found |= {"rendezvous": _host_and_port(flags["master"]), "rendezvous_hosted": False}
    if "rank" not in found or "world_size" not in found:
        raise ConfigError(
            "which stage this is was not told: start it with torchrun, srun or in a LeaderWorkerSet, "
            "or add --rank N --world-size N"
        )
    return _checked(RankInfo(**found))


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of RankInfo. torchrun goes first: it may run under one of the others."""
    if "RANK" in environ:
        return {
            "rank": _number(environ, "RANK"),
            "world_size": _number(environ, "WORLD_SIZE"),
            "local_rank": _number(environ, "LOCAL_RANK", 0),
            "local_world_size": _number(environ, "LOCAL_WORLD_SIZE", 1),
            "rendezvous": _master(environ, "MASTER_ADDR"),
            "rendezvous_hosted": environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            "launched": "TORCHELASTIC_RUN_ID" in environ,
        }
    if "LWS_WORKER_INDEX" in environ:  # one stage in each pod; stage 0 is in the leader's
        return {
            "rank": _number(environ, "LWS_WORKER_INDEX"),
            "world_size": _number(environ, "LWS_GROUP_SIZE"),
            "rendezvous": _master(environ, "LWS_LEADER_ADDRESS"),
        }
    if "SLURM_PROCID" in environ:  # each task has cores of its own, so none are to be shared with its neighbours
        return {
            "rank": _number(environ, "SLURM_PROCID"),
            "world_size": _number(environ, "SLURM_NTASKS"),
            "local_rank": _number(environ, "SLURM_LOCALID", 0),
            "rendezvous": _master(environ, "MASTER_ADDR"),
        }
    return {"rendezvous": _master(environ, "MASTER_ADDR")}


def _host_and_port(given: str) -> str:
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"--master: expected HOST:PORT, got {given!r}")
    return given


def _master(environ: Mapping[str, str], name: str) -> str:
    host = environ.get(name, "")
    port = _number(environ, "MASTER_PORT", MASTER_PORT)
    if not host:
        return ""
    return host_port(host, port)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} should be a whole number and is {text!r}") from None


def _checked(place: RankInfo) -> RankInfo:
    if not 0 <= place.rank < place.world_size:
        raise ConfigError(f"rank {place.rank} does not exist among {place.world_size} stages: they count from 0")
    if place.world_size > 1 and not place.rendezvous:
        raise ConfigError(
            "where the stages meet was not told: add --master HOST:PORT, an address of the machine of stage 0 "
            "(or set MASTER_ADDR and MASTER_PORT)"
        )
    return place
