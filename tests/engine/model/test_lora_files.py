"""Folders of adapters that are broken, or that hold what is not computed: one line that names the flag and the key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.requests.adapters import MAX_SALT_CHARS, adapter_folders, adapter_salt
from headrace.engine.load_plan import LoadPlan, plan_rank
from headrace.engine.model.lora import LoraAdapter
from tests.engine.models import Saved, make_runner

CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
LAYER = "base_model.model.model.layers.0"
Saver = Callable[[str], Saved]


def tensors(module: str = "self_attn.q_proj", sizes: tuple[int, int] = (48, 48), rank: int = 4) -> dict[str, Tensor]:
    return {
        f"{LAYER}.{module}.lora_A.weight": torch.ones(rank, sizes[1]),
        f"{LAYER}.{module}.lora_B.weight": torch.ones(sizes[0], rank),
    }


def folder(path: Path, weights: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | fields))
    save_file(tensors() if weights is None else weights, path / "adapter_model.safetensors")
    return path


def plan(saved: Saver, *flags: str, layers: range | None = None, tp: int = 1, **fields: Any) -> LoadPlan:
    model = ModelConfig(model=str(saved("llama").folder), dtype="float32", device="cpu", lora=flags, **fields)
    return plan_rank(model, EngineConfig(kv_pages=64), 256, layers=layers, tp=tp)


def refused(saved: Saver, flag: str, **fields: Any) -> str:
    with pytest.raises(ConfigError) as error:
        plan(saved, flag, **fields)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 500
    return text


@pytest.mark.parametrize("flag", ["x", "=x", "a=", "a b=x", "\x07=x", "n" * 129 + "=x"])
def test_flags_that_are_no_name_and_folder(flag: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lora .*write NAME=FOLDER"):
        adapter_folders([flag])


def test_a_name_that_comes_twice_and_too_many() -> None:
    with pytest.raises(ConfigError, match="--lora a=…: another adapter has this name"):
        adapter_folders(["a=x", "a=y"])
    with pytest.raises(ConfigError, match="257 adapters; at most 256"):
        adapter_folders([f"{number}=x" for number in range(257)])
    assert adapter_folders(["a=x=y", "b=z"]) == {"a": "x=y", "b": "z"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "'peft_type' is IA3"),
        ({"use_dora": True}, "'use_dora' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is not supported"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "'target_parameters' is not supported"),
        ({"trainable_token_indices": [1]}, "'trainable_token_indices' is not supported"),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' is not supported"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication' is not supported"),
        ({"fan_in_fan_out": True}, "'fan_in_fan_out' is not supported"),
        ({"lora_bias": True}, "'lora_bias' is not supported"),
        ({"something_new": {"a": 1}}, "'something_new' is not supported"),
        ({"bias": "all"}, "'bias' is all"),
        ({"init_lora_weights": "pissa_niter_4"}, "'init_lora_weights' is 'pissa_niter_4', which changes"),
        ({"r": 0}, "'r' has to be a whole number"),
        ({"r": None}, "'r' has to be"),
        ({"lora_alpha": "x"}, "'lora_alpha' has to be a number above 0"),
        ({"use_rslora": 3}, "'use_rslora' has to be true or false"),
        ({"rank_pattern": {"q_proj": -1}}, "'rank_pattern.q_proj' has to be"),
        ({"alpha_pattern": {"(": 1}}, "'alpha_pattern' has '(', no regular expression"),
        ({"r": 5}, "has lora_A [4, 48] and lora_B [48, 4]; of rank 5 they are"),
    ],
)
def test_configurations(saved: Saver, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    text = refused(saved, f"mine={folder(tmp_path / 'a', **fields)}")
    assert text.startswith("--lora mine: ")
    assert words in text


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "has no tensors"),
        ({f"{LAYER}.self_attn.q_proj.lora_magnitude_vector": torch.ones(2)}, "lora_magnitude_vector is not supported"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2)}, "lora_embedding_A is not supported"),
        ({f"{LAYER}.self_attn.q_proj.lora_B.bias": torch.ones(2)}, "lora_B.bias is not supported"),
        ({"base_model.model.lm_head.weight": torch.ones(2)}, "only lora_A and lora_B of linear layers are"),
        ({f"{LAYER}.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)}, "has no lora_B"),
        ({k: v.to(torch.int8) for k, v in tensors().items()}, "is stored as I8"),
        (tensors(sizes=(48, 40)), "is [48, 48] in the model and [48, 40] in the adapter"),
        (tensors("self_attn.other_proj"), "is no linear layer"),
        (tensors("mlp.experts.0.up_proj"), "is no linear layer"),
        ({k.replace("layers.0", "layers.3"): v for k, v in tensors().items()}, "is no linear layer"),
    ],
)
@pytest.mark.parametrize("decoder", ["native", "library"])
def test_weights(saved: Saver, tmp_path: Path, decoder: str, weights: dict[str, Tensor], words: str) -> None:
    flag = f"mine={folder(tmp_path / 'a', weights)}"
    with pytest.raises(ConfigError) as error:
        make_runner(saved("llama").folder, decoder=decoder, lora=[flag])
    assert str(error.value).startswith("--lora mine: ")
    assert words in str(error.value)


def test_folders(saved: Saver, tmp_path: Path) -> None:
    assert "is no folder" in refused(saved, f"a={tmp_path / 'none'}")
    assert "has no adapter_config.json" in refused(saved, f"a={tmp_path}")
    made = folder(tmp_path / "a")
    (made / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    assert "cannot be read as safetensors" in refused(saved, f"a={made}")
    (made / "adapter_config.json").write_text("[")
    assert "cannot be read as JSON" in refused(saved, f"a={made}")
    (made / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(saved, f"a={made}")


def test_fingerprints_are_of_weights_and_scaling(tmp_path: Path) -> None:
    one = LoraAdapter("one", folder(tmp_path / "a"))
    other = tensors()
    next(iter(other.values()))[0, 0] = torch.nextafter(torch.ones(()), torch.zeros(()))
    same = LoraAdapter("same", folder(tmp_path / "b", inference_mode=True, base_model_name_or_path="elsewhere"))
    assert one.fingerprint == same.fingerprint
    changed = [
        LoraAdapter("c", folder(tmp_path / "c", other)),
        LoraAdapter("d", folder(tmp_path / "d", lora_alpha=9)),
        LoraAdapter("e", folder(tmp_path / "e", use_rslora=True)),
    ]
    assert len({each.fingerprint for each in (one, *changed)}) == 4


def test_memory_of_a_rank(saved: Saver, tmp_path: Path) -> None:
    weights = tensors() | tensors("self_attn.k_proj", (16, 48)) | tensors("mlp.down_proj", (48, 80))
    flag = f"a={folder(tmp_path / 'a', weights)}"
    count = 4 * (48 + 48) + 4 * (16 + 48) + 4 * (48 + 80)
    whole = plan(saved, flag)
    assert whole.memory.adapter_bytes == 4 * count
    assert plan(saved, flag, f"b={tmp_path / 'a'}").memory.adapter_bytes == 4 * count
    assert plan(saved, flag, layers=range(1, 3)).memory.adapter_bytes == 0
    assert plan(saved, flag, tp=2).memory.adapter_bytes == 4 * 4 * (48 + 24 + 48 + 8 + 48 + 40)
    assert "adapters 0." in whole.memory.explanation
    assert "adapters" not in plan(saved).memory.explanation


def test_a_salt_of_an_adapter_is_no_client_s() -> None:
    longest = "\0" * MAX_SALT_CHARS
    salts = [adapter_salt(adapter, salt) for adapter in ("", "a" * 32, "b" * 32) for salt in ("", "x", longest)]
    assert len(set(salts)) == len(salts)
    assert salts[:3] == ["", "x", longest]
    assert all(len(salt) > MAX_SALT_CHARS for salt in salts[3:])
