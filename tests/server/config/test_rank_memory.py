"""Memory of ranks that share one machine: KV that several shards hold is counted as often as it is held."""

from pathlib import Path

import pytest

from headrace.core.types.errors import ConfigError
from headrace.core.types.ranks.layout import Layout
from headrace.engine.device import resolve_computation
from headrace.engine.model.expert_plan import plan_experts
from headrace.engine.model.source import load_spec, resolve_source
from headrace.server.config import rank_memory
from headrace.server.config.resolve import resolve
from tests.e2e.expert_models import family, save_experts
from tests.models.architectures import ARCHITECTURES
from tests.models.zoo import make_model
from tests.server.config.test_load import configure


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3, whose latents every shard holds whole."""
    return save_experts(tmp_path_factory.mktemp("latents"), family("deepseek-v3"))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_latents_count_once_per_shard(folder: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--model", str(folder), "--device", "cpu", "--dtype", "float32", "--tp", str(tp))
    found = resolve(configure(*flags, "--kv-pages", "64"))
    config, plans = found.config, found.memory
    page = tp * plans[0].page_bytes
    assert sum(plan.page_bytes for plan in plans) == page
    experts = plan_experts(
        resolve_computation(config.model, config.engine.cpuinfo),
        config.engine,
        config.scheduler.layout,
        load_spec(resolve_source(str(folder))),
    )
    held = sum(plan.weight_bytes for plan in plans)  # norms and routers on every shard
    other = held + (experts.exchange_bytes * tp if experts else 0)
    monkeypatch.setattr(rank_memory, "available_memory", lambda _: other + 64 * page)
    assert len(resolve(config).memory) == tp
    with pytest.raises(ConfigError, match="of KV pages do not fit"):
        resolve(configure(*flags, "--kv-pages", "65"))


@pytest.mark.parametrize(("gpus", "parts"), [(1, [20, 20, 20]), (2, [30, 30, 60]), (3, [60, 60, 60])])
def test_ranks_that_share_a_gpu_have_equal_parts_of_it(
    gpus: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_memory, "available_memory", lambda device: 60)
    monkeypatch.setattr(rank_memory, "own_device", lambda device, rank: f"{device}:{rank % gpus}")
    found = rank_memory._rooms("cuda", Layout(3, 1, 1))
    assert sorted(found) == parts


def test_stages_of_a_model_with_nothing_but_states(tmp_path: Path) -> None:
    make_model(ARCHITECTURES["mamba2"]).save_pretrained(tmp_path)
    plans = resolve(
        configure("--model", str(tmp_path), "--device", "cpu", "--pp", "2", "--max-model-len", "512")
    ).memory
    assert [plan.page_bytes for plan in plans] == [0, 0]
    assert all(plan.state_slots and plan.state_bytes for plan in plans)
