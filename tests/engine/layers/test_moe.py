"""Layers of experts on one rank: the results of transformers, bits that do not depend on the batch, bounded scratch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from headrace.core.types.errors import ConfigError
from headrace.engine.dtypes import Precision
from headrace.engine.layers.moe import Experts
from headrace.engine.model import expert_choice
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.model.checkpoint import SafetensorsCheckpoint
from headrace.engine.model.config_fields import Fields
from headrace.engine.model.expert_choice import NO_EXPERT, ExpertChoice
from headrace.engine.model.families import BY_MODEL_TYPE
from headrace.engine.model.moe_spec import MoeSpec
from headrace.engine.model.weights import LayerReader
from headrace.engine.native.kernel_calls import load_kernels
from tests.engine.layers.mixtures import KERNELS, SPECS, RandomWeights, make_mixture, needs_kernels, random_rows
from tests.engine.models import Prompt, Saved, make_runner, random_tokens, run_chunks

HIDDEN = 32
_DEEPSEEK: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "moe_intermediate_size": 16,
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MODULES: dict[str, tuple[type[nn.Module], Any]] = {
    "v2": (DeepseekV2Moe, DeepseekV2Config(**_DEEPSEEK, n_shared_experts=2, routed_scaling_factor=1.5)),
    "v2-groups": (
        DeepseekV2Moe,
        DeepseekV2Config(**_DEEPSEEK, n_shared_experts=1, topk_method="group_limited_greedy"),
    ),
    "v3": (DeepseekV3MoE, DeepseekV3Config(**_DEEPSEEK, n_shared_experts=1)),
}


class ModuleWeights:
    """transformers' MoE module of layer 0 as a checkpoint: its experts by the names that checkpoints have."""

    def __init__(self, module: nn.Module) -> None:
        state = module.state_dict()
        gate_up, down = state.pop("experts.gate_up_proj"), state.pop("experts.down_proj")
        for expert, (first, last) in enumerate(zip(gate_up, down, strict=True)):
            gate, up = first.chunk(2)
            state |= {f"experts.{expert}.{name}_proj.weight": weight
                      for name, weight in (("gate", gate), ("up", up), ("down", last))}  # fmt: skip
        self._tensors = {f"model.layers.0.mlp.{name}": weight for name, weight in state.items()}

    def read(self, name: str, shape: tuple[int, ...], rows: Any = None, columns: Any = None) -> torch.Tensor:
        """See Checkpoint."""
        assert self._tensors[name].shape == shape
        return self._tensors[name]

    def read_int8(self, name: str, shape: tuple[int, int], rows: Any = None, columns: Any = None) -> None:
        """See Checkpoint."""


@pytest.mark.parametrize("name", MODULES)
def test_deepseek_layers_equal_those_of_transformers(name: str) -> None:
    """Router, routed and shared experts together."""
    kind, config = MODULES[name]
    config._experts_implementation = "eager"
    module = kind(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(0.0, 0.4, generator=generator)
        x = random_rows(60, hidden=HIDDEN)
        expected = module(x[None])[0]
    read = BY_MODEL_TYPE[config.model_type].read_moe
    assert read is not None
    moe = read(Fields("config.json", config.to_dict()))
    assert moe is not None
    assert moe.layer_kinds == ("dense", "moe")
    checkpoint: Any = ModuleWeights(module)
    found = make_mixture(moe, checkpoint=checkpoint, hidden=HIDDEN).forward(x)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-plain"])
def test_the_experts_of_a_model_are_those_that_transformers_chooses(
    saved: Callable[[str], Saved], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(name)
    tokens = random_tokens(70)
    with torch.inference_mode():
        logits = model.model(torch.tensor([tokens]), output_router_logits=True).router_logits
    expected = [
        each.softmax(-1).topk(model.model.config.num_experts_per_tok).indices.sort(-1).values for each in logits
    ]
    chosen: list[torch.Tensor] = []

    def noted(
        logits: torch.Tensor, moe: MoeSpec, bias: torch.Tensor | None = None, shared: slice | None = None
    ) -> ExpertChoice:
        choice = choose(logits, moe, bias, shared)
        chosen.append(choice.experts.sort(-1).values)
        return choice

    choose = expert_choice.choose
    monkeypatch.setattr(expert_choice, "choose", noted)
    run_chunks(make_runner(model.folder), Prompt(1, tokens, list(range(5)), 16).chunks(70))
    assert len(chosen) == len(expected)
    for found, wanted in zip(chosen, expected, strict=True):
        assert torch.equal(found, wanted)
        assert len(wanted.unique()) > 2, "flat or constant routing proves nothing"


def kernels_for(dtype: torch.dtype) -> Arithmetic:
    kernels = load_kernels(wide=False, bfloat16=dtype == torch.bfloat16)
    if kernels is None:
        pytest.skip("torch's products depend on the number of rows")
    return kernels


@pytest.mark.parametrize(("dtype", "int8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("name", SPECS)
def test_bits_of_a_row_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, int8: bool) -> None:
    mixture = make_mixture(SPECS[name], dtype=dtype, int8=int8, arithmetic=kernels_for(dtype))
    x = random_rows(700, dtype=dtype)
    whole = mixture.forward(x)
    assert whole.dtype == dtype
    for first, count in ((0, 1), (699, 1), (3, 2), (50, 33), (100, 513)):
        assert torch.equal(mixture.forward(x[first : first + count].clone()), whole[first : first + count])


@pytest.mark.parametrize("name", SPECS)
def test_weights_in_8_bits_stay_close(name: str) -> None:
    """The router is never quantised: with the same choice of experts, only their products differ."""
    x = random_rows(50)
    exact = make_mixture(SPECS[name]).forward(x)
    found = make_mixture(SPECS[name], int8=True).forward(x)
    assert not torch.equal(found, exact)
    assert (found - exact).abs().mean() < 0.02 * exact.abs().mean()


class Spy(TorchArithmetic):
    """Notes the numbers of rows that are multiplied."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def gated_linear(self, x: torch.Tensor, gate_up: Any) -> torch.Tensor:
        """See Arithmetic."""
        self.rows.append(len(x))
        return super().gated_linear(x, gate_up)


def make_experts(moe: MoeSpec, own: range, tile_rows: int = 512) -> tuple[Experts, Spy]:
    spy = Spy()
    read = LayerReader(RandomWeights(), 0, Precision(*[torch.float32] * 3), "cpu", spy.pack)
    return Experts(moe, 16, own, read, spy, tile_rows), spy


def test_all_tokens_at_one_expert_are_computed_in_tiles() -> None:
    """No capacity, no dropped token, and never more rows at once than a tile has."""
    moe = SPECS["mixtral"]
    experts, spy = make_experts(moe, range(5), tile_rows=16)
    x = random_rows(100)
    choice = ExpertChoice(torch.tensor([[3, 1]] * 100), torch.tensor([[0.25, 0.75]] * 100))
    found = experts.compute(x, choice)
    assert spy.rows == [16, 16, 16, 16, 16, 16, 4] * 2
    assert experts.counts.tolist() == [0, 100, 0, 100, 0]
    whole, _ = make_experts(moe, range(5))
    torch.testing.assert_close(found, whole.compute(x, choice), atol=1e-5, rtol=1e-5)


def test_a_rank_computes_its_own_experts_only_and_counts_their_rows() -> None:
    moe = SPECS["mixtral"]
    x = random_rows(4)
    choice = ExpertChoice(torch.tensor([[0, 2], [2, NO_EXPERT], [4, 3], [NO_EXPERT, NO_EXPERT]]), torch.ones(4, 2))
    parts = []
    for own, rows in ((range(2), [1, 0]), (range(2, 5), [2, 1, 1])):
        experts, _ = make_experts(moe, own)
        parts.append(experts.compute(x, choice))
        assert experts.counts.tolist() == rows
    whole, _ = make_experts(moe, range(5))
    torch.testing.assert_close(parts[0] + parts[1], whole.compute(x, choice), atol=1e-5, rtol=1e-5)
    assert not parts[0][1:].any()
    assert not parts[1][3].any()


@needs_kernels
@pytest.mark.parametrize("name", SPECS)
def test_no_rows_are_no_work(name: str) -> None:
    mixture = make_mixture(SPECS[name], arithmetic=KERNELS)
    assert mixture.forward(random_rows(0)).shape == (0, 16)
    assert not mixture.counts.any()


def test_a_missing_expert_is_named(saved: Callable[[str], Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    read = SafetensorsCheckpoint.read

    def without(self: SafetensorsCheckpoint, name: str, *arguments: Any) -> torch.Tensor:
        return read(self, "absent" if "experts.3.up_proj" in name else name, *arguments)

    monkeypatch.setattr(SafetensorsCheckpoint, "read", without)
    with pytest.raises(ConfigError, match="absent of shape \\[32, 48\\] is missing"):
        make_runner(saved("qwen3-moe").folder)


def test_layers_of_experts_stay_close_in_bfloat16(saved: Callable[[str], Saved]) -> None:
    """Smoke test: routing may differ in single tokens, so few positions are compared."""
    model: PreTrainedModel = saved("mixtral").model
    tokens = random_tokens(20)
    runner = make_runner(saved("mixtral").folder, dtype="bfloat16")
    sampled = run_chunks(runner, Prompt(1, tokens, [0, 1], 16).chunks(20))
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    assert sampled.logprob is not None
    assert sampled.token in logits.topk(5).indices.tolist()
