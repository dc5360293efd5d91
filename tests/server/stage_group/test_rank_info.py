"""Rank and rendezvous of a stage: from flags, torchrun, Slurm and LeaderWorkerSets."""

import argparse
from typing import Any

import pytest

from headrace.core.types.errors import ConfigError
from headrace.server.stage_group.rank_info import RankInfo, add_flags, read_rank_info

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29411", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "MASTER_ADDR": "node-0"}
LEADER_WORKER_SET = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "prefill-0.prefill.ns"}


def flags(*given: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return vars(parser.parse_args(["--scheduler", "tcp://s:1", *given]))


@pytest.mark.parametrize(
    ("environ", "info"),
    [
        (
            TORCHRUN,
            RankInfo(
                rank=3, world_size=4, local_rank=1, local_world_size=2, rendezvous="node-0:29411",
                rendezvous_hosted=True, under_launcher=True,
            ),
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "7"},
            RankInfo(rank=0, world_size=2, rendezvous="[::1]:7"),
        ),
        (SLURM, RankInfo(rank=2, world_size=4, rendezvous="node-0:29500")),
        (LEADER_WORKER_SET, RankInfo(rank=1, world_size=2, rendezvous="prefill-0.prefill.ns:29500")),
        (SLURM | LEADER_WORKER_SET | TORCHRUN, read_rank_info(flags(), TORCHRUN)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, RankInfo(rank=0, world_size=1)),
    ],
)  # fmt: skip
def test_environment_of_launchers(environ: dict[str, str], info: RankInfo) -> None:
    assert read_rank_info(flags(), environ) == info


def test_flags_take_precedence_over_the_environment() -> None:
    given = flags("--rank", "1", "--world-size", "2", "--local-rank", "0", "--master", "10.0.0.1:99")
    expected = RankInfo(rank=1, world_size=2, rendezvous="10.0.0.1:99")
    for environ in ({}, SLURM, LEADER_WORKER_SET):
        assert read_rank_info(given, environ) == expected
    torchrun = read_rank_info(given, TORCHRUN)
    assert (torchrun.rank, torchrun.rendezvous, torchrun.rendezvous_hosted) == (1, "10.0.0.1:99", False)
    assert torchrun.under_launcher, "it ends with torchrun's agent, wherever its rank comes from"


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ([], {}, "--rank N --world-size N"),
        (["--rank", "0"], {}, "--world-size"),
        (["--rank", "0", "--world-size", "2"], {}, "--master HOST:PORT"),
        ([], {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "MASTER_ADDR"),
        (["--rank", "2", "--world-size", "2"], {}, "rank 2 does not exist among 2"),
        (["--rank", "-1"], TORCHRUN, "rank -1"),
        ([], {"RANK": "0"}, "WORLD_SIZE should be a whole number"),
        ([], TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK .* 'x'"),
        (["--master", "10.0.0.1"], TORCHRUN, "HOST:PORT"),
        (["--master", "10.0.0.1:0"], TORCHRUN, "HOST:PORT"),
    ],
)
def test_errors_name_what_is_missing_or_malformed(given: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rank_info(flags(*given), environ)
