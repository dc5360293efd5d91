"""What --expert-parallel resolves to: which rank holds which experts, passes of replicas, memory; and refusals."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.core.config import Config
from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.coordinate import Rules
from headrace.engine.device import resolve_computation
from headrace.engine.model.expert_plan import plan_experts
from headrace.engine.model.source import load_spec, resolve_source
from headrace.server.config.resolve import Resolved, resolve
from tests.e2e.expert_models import save_experts
from tests.server.config.test_load import configure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with six experts, of which a token takes two."""
    return save_experts(tmp_path_factory.mktemp("experts"))


def configured(folder: Path, flags: Sequence[str]) -> Config:
    common = ("--model", str(folder), "--device", "cpu", "--dtype", "float32", "--max-model-len", "256")
    return configure(*common, "--threads", "1", *flags)


def resolved(folder: Path, *flags: str) -> Resolved:
    return resolve(configured(folder, flags))


@pytest.mark.parametrize(
    ("flags", "lockstep", "rules"),
    [
        ("--dp 2 --expert-parallel", True, Rules(pad="max")),  # allgather: as many ranks as experts of a token
        ("--dp 3 --expert-parallel", True, Rules()),
        ("--dp 3 --expert-parallel --exchange allgather", True, Rules(pad="max")),
        ("--dp 2 --tp 2 --expert-parallel", True, Rules(multiple=2)),
        ("--dp 2 --expert-parallel --exchange alltoall", True, Rules()),
        (
            "--dp 3 --expert-parallel --overlap --overlap-prefill-tokens 100 --overlap-decode-tokens 4",
            True,
            Rules(cut=True, cut_prefill=100, cut_decode=4),
        ),
        ("--dp 2 --expert-parallel --overlap", True, Rules(pad="max", cut=True, cut_prefill=512, cut_decode=32)),
        ("--tp 2 --expert-parallel", False, Rules()),
        ("--dp 2", False, Rules()),
    ],
)
def test_only_replicas_that_share_experts_are_in_lockstep(
    folder: Path, flags: str, lockstep: bool, rules: Rules
) -> None:
    """S1: what shares no collective over replicas is not coordinated."""
    scheduler = resolved(folder, *flags.split()).config.scheduler
    assert (scheduler.lockstep, scheduler.rules) == (lockstep, rules)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2), (3, 2), (1, 2)])
def test_ranks_of_a_stage_hold_each_expert_once_and_plan_their_memory(folder: Path, dp: int, tp: int) -> None:
    flags = ("--pp", "2", "--dp", str(dp), "--tp", str(tp), "--expert-parallel")
    config = resolve(configured(folder, flags)).config
    layout = config.scheduler.layout
    plan = plan_experts(
        resolve_computation(config.model, config.engine.cpuinfo),
        config.engine,
        layout,
        load_spec(resolve_source(str(folder))),
    )
    assert plan is not None
    for stage in range(2):
        held = [plan.own(layout.place(rank)) for rank in layout.stage_ranks(stage)]
        assert [expert for each in held for expert in each] == list(range(6))
    found = resolve(configured(folder, flags))
    memory, parts = found.memory, found.parts
    assert "expert 5" in parts[-1] or "to 5" in parts[-1]
    assert all(f"between experts {plan.exchange_bytes / (1 << 20):.1f} MiB" in each.explanation for each in memory)
    everything = resolved(folder, "--pp", "2", "--tp", str(tp)).memory
    for rank, each in enumerate(memory):
        whole = everything[layout.place(rank).stage * tp + layout.place(rank).shard]
        assert each.weight_bytes <= whole.weight_bytes
        assert (each.weight_bytes < whole.weight_bytes) == (dp > 1)


def test_replicas_that_share_nothing_hold_all_experts(folder: Path) -> None:
    shared, whole = resolved(folder, "--dp", "2", "--expert-parallel"), resolved(folder, "--dp", "2")
    one = 3 * 3 * 32 * 16 * 4  # bytes of an expert in three layers
    assert [each.weight_bytes for each in whole.memory] == [shared.memory[0].weight_bytes + 3 * one] * 2


def test_more_ranks_than_experts_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"the 6 experts .* among 8 ranks .*product is 6 or less"):
        resolved(folder, "--dp", "4", "--tp", "2", "--expert-parallel")


def test_servers_that_share_experts_hold_a_part_each(folder: Path) -> None:
    """As the replicas of one server do; the scheduler of each plans for itself, with the same rules."""
    inside = resolved(folder, "--dp", "3", "--expert-parallel")
    servers = [
        resolved(folder, "--dp-external", f"{rank}/3@127.0.0.1:9000", "--expert-parallel", "--kv-pages", "64")
        for rank in range(3)
    ]
    assert [each.parts for each in servers] == [(part,) for part in inside.parts]
    for each in servers:
        assert each.memory[0].weight_bytes == inside.memory[0].weight_bytes
        assert (
            each.memory[0]
            .explanation.partition("between experts ")[2]
            .startswith(inside.memory[0].explanation.partition("between experts ")[2].partition(" MiB")[0])
        )
        assert each.config.scheduler.rules == inside.config.scheduler.rules
        assert not each.config.scheduler.lockstep


def test_what_servers_that_share_experts_cannot_do_is_refused(folder: Path) -> None:
    shared = ("--dp-external", "0/8@127.0.0.1:9000", "--expert-parallel")
    with pytest.raises(ConfigError, match=r"among 8 ranks of a stage \(SIZE 8 of --dp-external times --tp 1\)"):
        resolved(folder, *shared)
    with pytest.raises(ConfigError, match="--dp-sync device is for GPUs and --device is cpu"):
        resolved(folder, "--dp-external", "0/2@127.0.0.1:9000", "--expert-parallel", "--dp-sync", "device")
    with pytest.raises(ConfigError, match="--links device is for GPUs and --device is cpu"):
        resolved(folder, "--tp", "2", "--links", "device")
    resolved(folder, "--tp", "2", "--links", "host")


def test_a_front_end_plans_experts_without_loading_torch(folder: Path) -> None:
    program = f"""
import os, sys
from headrace.server.config.load import load
from headrace.server.config.resolve import resolve
given = {{"model": {str(folder)!r}, "device": "cpu", "dp": "2", "expert-parallel": True, "kv-pages": "64"}}
assert resolve(load(given, os.environ)).config.scheduler.lockstep
print("torch" in sys.modules)
"""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (child.stdout, child.returncode) == ("False\n", 0), child.stderr
