"""Routers choose the experts and weights that transformers' routers choose, and rows do not depend on one another."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from headrace.engine.model.arithmetic import linear
from headrace.engine.model.config_fields import Fields
from headrace.engine.model.expert_choice import choose
from headrace.engine.model.families import BY_MODEL_TYPE
from headrace.engine.model.moe_spec import MoeSpec

HIDDEN = 24
_SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN3: dict[str, Any] = {**_SIZES, "num_experts": 16, "num_experts_per_tok": 4}
_DEEPSEEK: dict[str, Any] = {**_SIZES, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
ROUTERS: dict[str, tuple[type[nn.Module], Any]] = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**_QWEN3, norm_topk_prob=True)),
    "qwen3-plain": (Qwen3MoeTopKRouter, Qwen3MoeConfig(**_QWEN3, norm_topk_prob=False)),
    "mixtral": (MixtralTopKRouter, MixtralConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2)),
    "v2-greedy": (DeepseekV2TopkRouter, DeepseekV2Config(**_DEEPSEEK, routed_scaling_factor=1.5)),
    "v2-groups": (
        DeepseekV2TopkRouter,
        DeepseekV2Config(**_DEEPSEEK, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
    ),
    "v3": (DeepseekV3TopkRouter, DeepseekV3Config(**_DEEPSEEK, norm_topk_prob=True)),
    "v3-plain": (DeepseekV3TopkRouter, DeepseekV3Config(**_DEEPSEEK, norm_topk_prob=False)),
    "v3-one-group": (DeepseekV3TopkRouter, DeepseekV3Config(**{**_DEEPSEEK, "n_group": 1, "topk_group": 1})),
}


def made(name: str) -> tuple[nn.Module, MoeSpec]:
    """transformers' router with random weights, and the specification read from its config.json."""
    kind, config = ROUTERS[name]
    router = kind(config)
    with torch.no_grad():
        router.weight.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
        if name.startswith("v3"):
            router.e_score_correction_bias.normal_(0.0, 0.4, generator=torch.Generator().manual_seed(2))
    read = BY_MODEL_TYPE[config.model_type].read_moe
    assert read is not None
    moe = read(Fields("config.json", config.to_dict()))
    assert moe is not None
    return router, moe


def bias_of(router: nn.Module) -> torch.Tensor | None:
    return getattr(router, "e_score_correction_bias", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_choice_and_weights_are_those_of_transformers(name: str, dtype: torch.dtype) -> None:
    router, moe = made(name)
    router.weight.data = router.weight.data.to(dtype)
    x = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        logits, expected_weights, expected = router(x)
        ours = linear(x.float(), router.weight.float()) if moe.float32_logits else linear(x, router.weight)
        found = choose(ours, moe, bias_of(router))
    assert torch.equal(ours, logits)
    expected, order = expected.sort(-1)
    torch.testing.assert_close(found.experts.sort(-1).values, expected, atol=0, rtol=0)
    weights = found.weights.gather(-1, found.experts.sort(-1).indices)
    torch.testing.assert_close(weights, expected_weights.gather(-1, order).float(), atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("name", ROUTERS)
def test_a_row_does_not_depend_on_the_number_of_rows(name: str) -> None:
    """513 and more rows: torch splits some operations among threads and by vectors."""
    router, moe = made(name)
    logits = torch.randn(2100, moe.experts, generator=torch.Generator().manual_seed(4))
    whole = choose(logits, moe, bias_of(router))
    for first, count in ((0, 1), (2099, 1), (5, 3), (7, 513), (1000, 1100)):
        part = choose(logits[first : first + count].clone(), moe, bias_of(router))
        assert torch.equal(part.experts, whole.experts[first : first + count])
        assert torch.equal(part.weights.view(torch.int32), whole.weights[first : first + count].view(torch.int32))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    _, moe = made("v3-one-group")
    logits = torch.zeros(1, moe.experts)
    bias = torch.zeros(moe.experts)
    bias[[3, 5, 7, 11]] = 1.0
    found = choose(logits, moe, bias)
    assert sorted(found.experts[0].tolist()) == [3, 5, 7, 11]
    torch.testing.assert_close(found.weights, torch.full((1, 4), moe.scaling / 4))
