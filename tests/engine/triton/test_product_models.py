"""Models whose products do what surrounds them, by Triton's interpreter, beside the steps that they replace."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.engine.layers.lora import AdaptedLinear
from headrace.engine.model.arithmetic import Arithmetic, TorchArithmetic
from headrace.engine.model.weights import Delta
from tests.engine.models import reported_logprobs
from tests.engine.triton.products import Always, Asked, fused
from tests.engine.triton.test_models import make, plans

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 199, "tie_word_embeddings": False,
}  # fmt: skip


def model(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    if name == "llama-bias":
        return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES))
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True)
    )


def results(folder: Path, arithmetic: Arithmetic, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logprobs of chunks behind prefixes, and of rows that decode."""
    made = make(folder, arithmetic, monkeypatch, "bfloat16")
    # The first greedy tokens may differ, since values are rounded otherwise: those of prompts alone are compared.
    return torch.stack([reported_logprobs(row) for rows in plans()[:2] for row in made.execute(rows)[0][:1]])


DENSE = {("heads", False), ("heads", True), ("gated", True), ("added", False)}
EXPECTED = {"llama-bias": DENSE, "qwen3": DENSE, "qwen3-moe": {("heads", False), ("gated", False), ("added", False)}}
"""Products by name, and whether they norm their rows: those of the first layer are normed, and those of experts."""


@pytest.mark.parametrize("name", ["llama-bias", "qwen3-moe", pytest.param("qwen3", marks=pytest.mark.full)])
def test_near_the_results_of_separate_steps(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model(name).bfloat16().save_pretrained(tmp_path)
    choice = Always()
    found = results(tmp_path, fused(modules, choice), monkeypatch)
    expected = results(tmp_path, TorchArithmetic(), monkeypatch)
    assert set(choice.asked) == EXPECTED[name]
    assert (found - expected).abs().mean() < 0.02


@pytest.mark.parametrize(
    "missing", ["gated", *(pytest.param(each, marks=pytest.mark.full) for each in ("heads", "added"))]
)
def test_each_product_goes_with_torchs_beside_it(
    tmp_path: Path, modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def allow(asked: Asked) -> bool:
        return asked.form != missing

    model("qwen3").bfloat16().save_pretrained(tmp_path)
    choice = Always(allow)
    found = results(tmp_path, fused(modules, choice), monkeypatch)
    expected = results(tmp_path, TorchArithmetic(), monkeypatch)
    normed = missing != "added"
    assert any(asked.normed for asked in choice.asked) == normed, "only products know the power of what they add to"
    assert (found - expected).abs().mean() < 0.02


def test_where_adapters_may_come_between_products_are_apart(modules: dict[str, ModuleType]) -> None:
    """Whether a pass has some or not: what is rounded for a row does not depend on adapters of others."""
    choice = Always()
    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    delta = Delta(range(4), weight[:1], weight[:, :1])
    x = torch.ones(3, 8, dtype=torch.bfloat16)
    for deltas, asked in (({"a": [delta]}, 0), ({}, 2)):
        layer = AdaptedLinear(fused(modules, choice), weight, None, deltas)
        layer.gated(x, ())
        layer.add_to(torch.zeros(3, 4, dtype=torch.bfloat16), x, ())
        assert len(choice.asked) == asked
