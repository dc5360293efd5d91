"""The flags of `headrace up`, beside those of `headrace serve`."""

import argparse
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from headrace.core.types.errors import ConfigError

DESCRIPTION = "run a server whose ranks are placed on a Ray cluster, watched there and replaced"
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
PLACE_TIMEOUT_S = 600.0


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks go."""

    ray: str
    """Address of the cluster, as ray.init takes it."""
    rank_cpus: float
    """CPUs of Ray's that each rank takes."""
    rank_gpus: float | None
    """GPUs of Ray's that each rank takes; None: one where the cluster has any."""
    strategy: Strategy
    place_timeout_s: float
    """Longest wait for room on the cluster."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add them."""
    ours = parser.add_argument_group("cluster")
    ours.add_argument(
        "--ray",
        required=True,
        metavar="ADDRESS",
        help="the Ray cluster: HOST:PORT, or auto for the one of this machine",
    )
    ours.add_argument(
        "--rank-cpus", default=1.0, type=float, metavar="N", help="CPUs that a rank reserves (default: %(default)g)"
    )
    ours.add_argument(
        "--rank-gpus", type=float, metavar="N", help="GPUs that a rank reserves (default: 1 if the cluster has GPUs)"
    )
    ours.add_argument(
        "--placement",
        default="PACK",
        choices=get_args(Strategy),
        help="Ray's strategy: PACK puts ranks on few nodes, SPREAD on many, STRICT_ insists (default: %(default)s)",
    )
    ours.add_argument(
        "--place-timeout",
        default=PLACE_TIMEOUT_S,
        type=float,
        metavar="SECONDS",
        help="longest wait for room on the cluster (default: %(default)g)",
    )


def split(arguments: Sequence[str]) -> tuple[UpOptions, list[str]]:
    """The flags of `headrace up`, and the remaining ones, which are the server's. Raises ConfigError for bad values."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_flags(parser)
    given, rest = parser.parse_known_args(arguments)
    for name, value in (("--rank-cpus", given.rank_cpus), ("--rank-gpus", given.rank_gpus or 0.0)):
        if not 0 <= value < 1e6:
            raise ConfigError(f"{name}: expected a number, at least 0, got {value:g}")
    options = UpOptions(
        ray=given.ray,
        rank_cpus=given.rank_cpus,
        rank_gpus=given.rank_gpus,
        strategy=given.placement,
        place_timeout_s=given.place_timeout,
    )
    return options, rest
