"""What config.json says of DeepSeek models, in the notation of transformers 4 and 5."""

import math
from typing import Any

import pytest

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.device import Computation
from headrace.engine.kv.memory_plan import plan_memory, stage_geometry, weight_count
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.model.sharding import attention_weights, part_of, whole_model
from headrace.engine.parallel.layer_split import layer_flops

YARN = {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
LITE: dict[str, Any] = {  # DeepSeek-V2-Lite, with dense layers only
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": {"type": "yarn", **YARN},
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
}


def test_sizes_of_a_published_model() -> None:
    spec = spec_from_config(LITE)
    assert spec.mla is not None
    assert spec.mla.score_factor == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert spec.mla == MlaSpec(
        kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128, score_factor=spec.mla.score_factor
    )
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim) == (16, 16, 192, 64)
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert layer_flops(spec) == 2 * (attention + 3 * 2048 * 10944)
    assert weight_count(part_of(spec, range(1, 3))) == 2 * (attention + 3 * 2048 * 10944 + 512 + 2 * 2048)


def test_a_pool_holds_a_latent_per_token() -> None:
    spec = spec_from_config(LITE)
    latent = Component("latent", "bfloat16", 7, kv_heads=1, head_dim=576, planes=1, layer_start=5)
    geometry = stage_geometry(part_of(spec, range(5, 12)), "bfloat16", 16)
    assert geometry == Geometry("bfloat16", 0, 0, 0, 16, components=(latent,))
    plan = plan_memory(
        part_of(spec), Computation("cpu", "bfloat16", native=True), 16, 1000, 1 << 40, max_model_len=16000
    )
    assert plan.page_bytes == 16 * 27 * 576 * 2
    assert "31104 bytes per token" in plan.explanation


def test_matrices_between_latents_and_heads_are_never_in_8_bits() -> None:
    spec = spec_from_config(LITE)
    assert spec.mla is not None
    kept = 27 * 512 * 16 * 256
    linear = 27 * (attention_weights(spec, whole_model(spec)) + 3 * 2048 * 10944)
    for native_units, size in ((True, 2), (False, 4)):
        plan = plan_memory(
            part_of(spec),
            Computation("cpu", "bfloat16", native=native_units),
            16,
            1000,
            1 << 40,
            max_model_len=16000,
            int8=True,
        )
        assert plan.weight_bytes == (linear - kept) + size * kept + 2 * (weight_count(part_of(spec)) - linear)


def test_both_notations_mean_the_same() -> None:
    new = {**LITE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000, **YARN}}
    new["head_dim"], new["qk_head_dim"] = 64, 192  # as transformers 5 writes
    assert spec_from_config(new | {"rope_scaling": None}) == spec_from_config(LITE)


def test_further_layers_that_predict_tokens_are_not_read() -> None:
    v3 = {**LITE, "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 1536, "num_nextn_predict_layers": 1}
    spec = spec_from_config(v3)
    assert (spec.family, spec.layers) == ("deepseek_v3", 27)
    assert spec.mla is not None
    assert spec.mla.query_rank == 1536


def test_scores_are_scaled_by_yarn_only() -> None:
    plain = spec_from_config({**LITE, "rope_scaling": None})
    linear = spec_from_config({**LITE, "rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}})
    without = spec_from_config({**LITE, "rope_scaling": {"type": "yarn", "factor": 4.0}})
    for spec in (plain, linear, without):
        assert spec.mla is not None
        assert spec.mla.scale == 1 / math.sqrt(192)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_interleave": False}, "rope_interleave false is not supported"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' has to be a whole number from 1"),
        ({"kv_lora_rank": 0}, "'kv_lora_rank' has to be a whole number from 1"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
    ],
)
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_from_config({**LITE, **change})
