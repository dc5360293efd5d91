"""Quantised checkpoints as they are published: what is computed is the model of the weights that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.core.types.errors import ConfigError
from tests.engine.models import make_runner, random_tokens
from tests.models.architectures import ARCHITECTURES
from tests.models.published import PUBLISHED, edit, publish, publish_in_blocks, publish_in_mxfp4
from tests.models.test_zoo import CLOSE, LENGTH, STEPS, computed
from tests.models.zoo import make_model, reference

QUICK = ("fp8-blocks", "w4a16-asymmetric", "awq", "gptq-act-order", "bitsandbytes-4", "nvfp4-modelopt")


@pytest.mark.parametrize("decoder", ["native", "library"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in PUBLISHED]
)
def test_a_published_form_is_the_model_of_its_weights(name: str, decoder: str, tmp_path: Path) -> None:
    model = make_model(ARCHITECTURES["qwen3"])
    publish(tmp_path, model, PUBLISHED[name])
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    found = computed([make_runner(tmp_path, decoder=decoder)], expected)
    torch.testing.assert_close(found, expected.logprobs, atol=CLOSE, rtol=CLOSE)


def test_latent_attention_and_experts_in_blocks_of_float8(tmp_path: Path) -> None:
    """As DeepSeek-V3 and Kimi K2 are published, an expert's matrices apart; in two stages."""
    model = make_model(ARCHITECTURES["deepseek-v3"])
    publish_in_blocks(tmp_path, model)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3." in name and name.endswith("weight_scale_inv") for name in tensors)
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    runners = [make_runner(tmp_path, layers=layers) for layers in (range(2), range(2, 4))]
    torch.testing.assert_close(computed(runners, expected), expected.logprobs, atol=CLOSE, rtol=CLOSE)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = make_model(ARCHITECTURES["gpt-oss"])
    publish_in_mxfp4(tmp_path, model)
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    found = computed([make_runner(tmp_path)], expected)
    torch.testing.assert_close(found, expected.logprobs, atol=CLOSE, rtol=CLOSE)


def test_eight_bits_are_made_of_eight_bits(tmp_path: Path) -> None:
    """--quantize int8 of a model in blocks of float8."""
    model = make_model(ARCHITECTURES["qwen3"])
    publish(tmp_path, model, PUBLISHED["fp8-blocks"])
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    native, library = (
        computed([make_runner(tmp_path, decoder=decoder, quantize="int8")], expected)
        for decoder in ("native", "library")
    )
    assert 1e-4 < (native - expected.logprobs).abs().mean() < 0.2
    assert (library - expected.logprobs).abs().mean() < 0.2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; supported are fp8, compressed-tensors"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ's version 'gemv' is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq in 3 bits is not supported; supported are 2, 4 and 8"),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "transform_config"),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "'sparse-24'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size.* a list of two sizes"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    make_model(ARCHITECTURES["qwen3"]).save_pretrained(tmp_path)
    edit(tmp_path, {"quantization_config": config})
    with pytest.raises(ConfigError, match=words):
        make_runner(tmp_path)


@pytest.mark.parametrize("decoder", ["native", "library"])
@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("fp8-blocks", "weight_scale_inv", "stored as F8_E4M3, .* there is none beside it"),
        ("int8", "weight_scale", "stored as I8, .* there is none beside it"),
        ("bitsandbytes-8", "SCB", "stored as I8, .* there is none beside it"),
        ("w4a16", "weight_scale", "has no .*weight_scale beside it"),
        ("awq", "qzeros", "has no .*qzeros beside it"),
        ("bitsandbytes-4", "weight.absmax", "stored as U8, .* these were not found"),
        ("nvfp4", "weight_global_scale", "has no .*weight_global_scale beside it"),
    ],
)
def test_no_weight_is_taken_without_its_scale(tmp_path: Path, decoder: str, name: str, part: str, words: str) -> None:
    publish(tmp_path, make_model(ARCHITECTURES["qwen3"]), PUBLISHED[name])
    path = tmp_path / "model.safetensors"
    lost = f"model.layers.1.mlp.up_proj.{part}"
    save_file({each: tensor for each, tensor in load_file(path).items() if each != lost}, path)
    with pytest.raises(ConfigError, match=words):
        make_runner(tmp_path, decoder=decoder)


@pytest.mark.parametrize(
    ("name", "part", "change"),
    [
        ("gptq", "g_idx", lambda tensor: tensor + 100),
        ("w4a16", "weight_scale", lambda tensor: tensor[:-3].contiguous()),
        ("awq", "qzeros", lambda tensor: tensor[:1, :3].contiguous()),
        ("bitsandbytes-4", "weight.absmax", lambda tensor: tensor[:5].contiguous()),
    ],
)
def test_parts_that_contradict_each_other_are_named(tmp_path: Path, name: str, part: str, change: Any) -> None:
    publish(tmp_path, make_model(ARCHITECTURES["qwen3"]), PUBLISHED[name])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"model.layers.1.mlp.up_proj.{part}"] = change(tensors[f"model.layers.1.mlp.up_proj.{part}"])
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"quantised tensor .*up_proj\.weight in .* cannot be expanded"):
        make_runner(tmp_path)
