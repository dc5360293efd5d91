"""Rank and rendezvous of an external stage: from flags, or from the environment variables of torchrun, Slurm and
Kubernetes LeaderWorkerSets."""

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.config import STAGE_KEY_VARIABLE, TransferConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.peers.addresses import host_port

LAUNCHER_VARIABLE, RAY = "HEADRACE_LAUNCHER", "ray"  # set for the processes that `headrace up` starts
MASTER_PORT = 29500  # default of torchrun
JOIN_TIMEOUT_S = 600.0

FLAGS: dict[str, dict[str, Any]] = {
    "scheduler": {
        "required": True,
        "metavar": "tcp://HOST:PORT",
        "help": "address that headrace serve prints for stages to join",
    },
    "rank": {"type": int, "metavar": "N", "help": "rank of this process, from 0 (default: set by the launcher)"},
    "world-size": {
        "type": int,
        "metavar": "N",
        "help": "number of ranks, --pp times --tp of the server (default: set by the launcher)",
    },
    "local-rank": {
        "type": int,
        "metavar": "N",
        "help": "rank among those of this machine (default: set by the launcher)",
    },
    "master": {
        "metavar": "HOST:PORT",
        "help": "rendezvous of the stages, an address of stage 0 (default: set by the launcher)",
    },
    "transfer-host": {
        "default": TransferConfig().host,
        "metavar": "ADDRESS",
        "help": "address where decode servers reach this stage (default: %(default)s)",
    },
    "data-port": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "data port, plus the local rank; 0: derived from the server's --data-port, or a free one (default: 0)",
    },
    "stage-key": {"metavar": "TEXT", "help": f"the server's --stage-key; also {STAGE_KEY_VARIABLE}"},
    "join-timeout": {
        "type": float,
        "default": JOIN_TIMEOUT_S,
        "metavar": "SECONDS",
        "help": "longest wait for the scheduler and the other stages (default: %(default)g)",
    },
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headrace stage`. Everything that stages have in common is configured at the server."""
    for name, options in FLAGS.items():
        parser.add_argument(f"--{name}", **options)


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Rank of this stage, and where the stages of the group meet."""

    rank: int
    """In the layout of the server: (stage * dp + replica) * tp + shard."""
    world_size: int
    local_rank: int = 0
    """Rank among those of this machine."""
    local_world_size: int = 1
    rendezvous: str = ""
    """HOST:PORT of the torch.distributed store."""
    rendezvous_hosted: bool = False
    """Whether torchrun's agent hosts the store; else rank 0 does."""
    under_launcher: bool = False
    """Whether the parent process is torchrun's agent or a worker of Ray's, with which this process has to end."""


def read_rank_info(flags: Mapping[str, Any], environ: Mapping[str, str]) -> RankInfo:
    """Flags rank, world_size, local_rank and master (HOST:PORT; None: not given) take precedence over the environment.

    Raises ConfigError when rank, world size or rendezvous are missing or malformed.
    """
    found = _environment(environ)
    found |= {name: flags[name] for name in ("rank", "world_size", "local_rank") if flags[name] is not None}
    if flags["master"] is not None:
        found |= {"rendezvous": _host_and_port(flags["master"]), "rendezvous_hosted": False}
    if "rank" not in found or "world_size" not in found:
        raise ConfigError(
            "rank and world size of this stage are unknown: start it with torchrun, srun or in a LeaderWorkerSet, "
            "or add --rank N --world-size N"
        )
    return _checked(RankInfo(**found))


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Fields of RankInfo. torchrun takes precedence: it may run under one of the others."""
    if "RANK" in environ:
        return {
            "rank": _number(environ, "RANK"),
            "world_size": _number(environ, "WORLD_SIZE"),
            "local_rank": _number(environ, "LOCAL_RANK", 0),
            "local_world_size": _number(environ, "LOCAL_WORLD_SIZE", 1),
            "rendezvous": _master(environ, "MASTER_ADDR"),
            "rendezvous_hosted": environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            "under_launcher": "TORCHELASTIC_RUN_ID" in environ or environ.get(LAUNCHER_VARIABLE) == RAY,
        }
    if "LWS_WORKER_INDEX" in environ:  # one rank per pod; rank 0 is in the leader's
        return {
            "rank": _number(environ, "LWS_WORKER_INDEX"),
            "world_size": _number(environ, "LWS_GROUP_SIZE"),
            "rendezvous": _master(environ, "LWS_LEADER_ADDRESS"),
        }
    if "SLURM_PROCID" in environ:  # each task has its own cores: local_world_size stays 1
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


def _checked(info: RankInfo) -> RankInfo:
    if not 0 <= info.rank < info.world_size:
        raise ConfigError(f"rank {info.rank} does not exist among {info.world_size} stages: they count from 0")
    if info.world_size > 1 and not info.rendezvous:
        raise ConfigError(
            "the stages' rendezvous is unknown: add --master HOST:PORT, an address of the machine of stage 0 "
            "(or set MASTER_ADDR and MASTER_PORT)"
        )
    return info
