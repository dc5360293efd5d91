"""Models whose weights are published in FP8 with products in FP8, by Triton's interpreter, beside the expanded ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from headrace.core.config import EngineConfig, ModelConfig
from headrace.engine import runner
from headrace.engine.layers import moe
from headrace.engine.layers.latent_attention import LatentAttentionBlock
from headrace.engine.load_plan import plan_rank
from headrace.engine.model.arithmetic import TorchArithmetic
from headrace.engine.model.float8 import BLOCK, Float8Weight
from headrace.engine.runner import ModelRunner
from tests.cpus import cpuinfo
from tests.engine.models import GREEDY, Prompt, random_tokens, reported_logprobs
from tests.models import published

SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 199, "tie_word_embeddings": False,
}  # fmt: skip

LATENT_SIZES: dict[str, Any] = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32,
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def weights_of(decoder: Any) -> Iterator[object]:
    for layer in decoder._layers:
        attention = layer.attention
        if isinstance(attention, LatentAttentionBlock):
            yield from (attention._first, attention._query_b, attention._output)
        else:
            yield from (attention.qkv.weight, attention.output.weight)
        if isinstance(layer.mlp, moe.MoeMlp):
            yield from (layer.mlp._experts._gate_up, layer.mlp._experts._down)
        else:
            yield from (layer.mlp.gate_up.weight, layer.mlp.down.weight)


def make(folder: Path, arithmetic: TorchArithmetic, monkeypatch: pytest.MonkeyPatch, *, float8: bool) -> ModelRunner:
    monkeypatch.setattr(runner, "choose_arithmetic", lambda *_: arithmetic)
    model = ModelConfig(model=str(folder), dtype="bfloat16", device="cpu")
    plan = plan_rank(model, EngineConfig(kv_pages=16, threads=1, cpuinfo=cpuinfo("bf16")), 128)
    terms = plan.terms._replace(float8=float8, computation=plan.terms.computation._replace(native=True))
    made = ModelRunner(plan._replace(terms=terms))
    assert {type(each) for each in weights_of(made._decoder)} == {Float8Weight if float8 else torch.Tensor}
    return made


@pytest.mark.parametrize("form", ["fp8-blocks", "fp8-tensor", "fp8-channel"])
@pytest.mark.parametrize("kind", ["dense", "experts", "latents"])
def test_products_in_float8(
    kind: str, form: str, tmp_path: Path, interpreted: TorchArithmetic, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    if kind == "latents":
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | LATENT_SIZES)).eval()
    elif kind == "experts":
        config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
        model = Qwen3MoeForCausalLM(config).eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()
    monkeypatch.setattr(moe, "can_group", lambda *_: True)  # as on a GPU
    monkeypatch.setattr(published, "BLOCK", BLOCK)
    config_of = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
    published.publish(tmp_path, model, published.PUBLISHED[form])
    if form == "fp8-blocks":
        published.edit(tmp_path, config_of)
    row = Prompt(1, random_tokens(9, 1), [1, 0], 16).row(0, 9, sample=GREEDY)
    found, expected = (
        reported_logprobs(make(tmp_path, each, monkeypatch, float8=float8).execute([row])[0][0])
        for each, float8 in ((interpreted, True), (TorchArithmetic(), False))
    )
    assert 1e-4 < (found - expected).abs().mean() < 0.05
