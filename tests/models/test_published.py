"""Quantised checkpoints as they are published: what is computed is the model of the weights that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.core.types.errors import ConfigError
from tests.engine.models import make_runner, random_tokens
from tests.models.architectures import ARCHITECTURES
from tests.models.published import PUBLISHED, Published, nibbles
from tests.models.test_zoo import CLOSE, LENGTH, STEPS, computed
from tests.models.zoo import make_model, reference

QUICK = ("fp8-blocks", "w4a16-asymmetric", "awq", "gptq-act-order", "bitsandbytes-4", "nvfp4-modelopt")


def publish(folder: Path, model: Any, form: Published) -> None:
    """Save a model in this form, and give it the weights that the form stands for."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, stored = load_file(path), {}
    own = model.state_dict()
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        parts, expected = form.make(weight)
        stored.update({name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in parts.items()})
        if name in own:  # experts are joined in the model
            own[name].copy_(expected)
    save_file(stored, path)
    edit(folder, {form.key: form.config} if form.config else {})
    if form.file is not None:
        (folder / form.file[0]).write_text(json.dumps(form.file[1]))


def edit(folder: Path, fields: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


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
    publish(tmp_path, model, PUBLISHED["fp8-blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3." in name and name.endswith("weight_scale_inv") for name in tensors)
    # Joined in the model: those are the weights that the parts stand for.
    for module in model.modules():
        if hasattr(module, "gate_up_proj") and module.gate_up_proj.dim() == 3:
            for weight in (module.gate_up_proj, module.down_proj):
                weight.data = torch.stack([joined(each) for each in weight.data])
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    runners = [make_runner(tmp_path, layers=layers) for layers in (range(2), range(2, 4))]
    torch.testing.assert_close(computed(runners, expected), expected.logprobs, atol=CLOSE, rtol=CLOSE)


def joined(weight: torch.Tensor) -> torch.Tensor:
    """What an expert's matrix stands for; gate and up projection were published apart."""
    halves = weight.chunk(2) if len(weight) == 64 and weight.shape[1] == 64 else (weight,)
    return torch.cat([PUBLISHED["fp8-blocks"].make(half)[1] for half in halves])


def test_experts_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = make_model(ARCHITECTURES["gpt-oss"])
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    stored, own = load_file(path), model.state_dict()
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        weight = stored.pop(name).transpose(1, 2)  # [experts, outputs, inputs]
        apart = weight.reshape(-1, 32)
        exponents = torch.floor(torch.log2(apart.abs().amax(1) / 6)) + 1
        coded, values = nibbles(apart / torch.exp2(exponents)[:, None])
        shape = (*weight.shape[:2], -1)
        stored[f"{name}_blocks"] = coded.view(*shape, 16)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8).view(shape)
        own[name].copy_((values * torch.exp2(exponents)[:, None]).view(weight.shape).transpose(1, 2))
    save_file(stored, path)
    edit(tmp_path, {"quantization_config": {"quant_method": "mxfp4"}})
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
