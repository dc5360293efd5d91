"""What config.json may say, and what the answers to mistakes look like."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config import RopeSpec, spec_from_config
from headrace.engine.model.rope import inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def test_defaults_of_a_bare_config() -> None:
    spec = spec_from_config(BASE)
    assert (spec.kv_heads, spec.head_dim, spec.tied, spec.qkv_bias, spec.qk_norm) == (4, 16, False, False, False)
    assert spec.rope == RopeSpec(original_positions=2048)
    assert spec.resolve_length(0) == 2048


def test_families_differ_in_their_switches() -> None:
    qwen2 = spec_from_config({**BASE, "architectures": ["Qwen2ForCausalLM"]})
    qwen3 = spec_from_config({**BASE, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, 16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    by_type = {key: value for key, value in BASE.items() if key != "architectures"}
    assert spec_from_config({**by_type, "model_type": "mistral"}).family == "mistral"


def test_both_rope_notations_mean_the_same() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 512}
    old = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    new = {**BASE, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    assert spec_from_config(old) == spec_from_config(new)
    assert spec_from_config(new).rope.theta == 5e5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    rope = {"rope_theta": 50000.0, "original_max_position_embeddings": 512, **rope}
    config = LlamaConfig(**{**BASE, "rope_parameters": rope})
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)
    found, found_scale = inverse_frequencies(spec_from_config(config.to_dict()).rope, 16)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert found_scale == pytest.approx(scale)


def test_sliding_windows_limit_the_length() -> None:
    spec = spec_from_config({**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": 512})
    assert spec.resolve_length(0) == 512
    with pytest.raises(ConfigError, match="max_model_len 600 is above 512, the limit that its sliding window"):
        spec.resolve_length(600)
    unlimited: list[dict[str, Any]] = [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 256, "use_sliding_window": False},
    ]
    for config in unlimited:
        assert spec_from_config({**BASE, **config}).position_limit == 2048
    with pytest.raises(ConfigError, match="max_model_len 4096 is above 2048, the limit that its positions"):
        spec_from_config(BASE).resolve_length(4096)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "gemma"}, "model_type gemma is not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported; supported is 'silu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported; supported are default"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_size": None}, "'hidden_size' has to be a whole number from 1 to 2147483647, got null"),
        ({"vocab_size": "many"}, "'vocab_size' has to be a whole number from 1 to 2147483647, got 'many'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' has to be a whole number from 1 to 10000, got 0"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from_config({**BASE, **change})
