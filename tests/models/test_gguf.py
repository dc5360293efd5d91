"""GGUF files of models that transformers' modules compute: what is computed is the model that was written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.engine.load_plan import model_spec, plan_rank
from headrace.engine.model.checkpoint import check_files
from headrace.engine.model.source import resolve_source
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_runner, random_tokens
from tests.models.architectures import ARCHITECTURES
from tests.models.gguf_forms import FORMS, publish
from tests.models.test_zoo import CLOSE, LENGTH, STEPS, computed
from tests.models.zoo import make_model, reference

QUICK = ("gemma3", "qwen3-moe", "gpt-oss", "deepseek-v3")
KINDS = GGMLQuantizationType


def some(names: list[str]) -> list[Any]:
    """The quick ones, and the others in make full."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def make(name: str) -> Any:
    return make_model(ARCHITECTURES[name], **FORMS[name].others)


def check_computed(path: Path, model: Any, parts: int = 1) -> None:
    expected = reference(model, random_tokens(LENGTH), STEPS + 1)
    layers = model.config.num_hidden_layers
    stages = [range(layers * part // parts, layers * (part + 1) // parts) for part in range(parts)]
    runners = [make_runner(path, decoder="library", layers=stage) for stage in stages]
    torch.testing.assert_close(computed(runners, expected), expected.logprobs, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("name", some(list(FORMS)))
def test_a_gguf_file_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model = make(name)
    publish(tmp_path / "m.gguf", model, FORMS[name])
    check_computed(tmp_path / "m.gguf", model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt-oss", KINDS.MXFP4), ("qwen3-moe", KINDS.Q8_0), ("gemma3", KINDS.Q4_0), ("glm4.5", KINDS.Q5_1)],
)
def test_quantised_files_in_two_stages(name: str, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    model = make(name)
    publish(tmp_path / "m.gguf", model, FORMS[name], kind)
    check_computed(tmp_path / "m.gguf", model, 2)


def test_experts_whose_gates_and_values_are_one_tensor(tmp_path: Path) -> None:
    def join(tensors: dict[str, Any]) -> dict[str, Any]:
        for layer in range(4):
            both = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(both, 1)
        return tensors

    model = make("qwen3-moe")
    publish(tmp_path / "m.gguf", model, FORMS["qwen3-moe"], tensors=join)
    check_computed(tmp_path / "m.gguf", model)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    further = {"nextn_predict_layers": 1, "block_count": 5}
    more = {f"blk.4.{part}.weight": np.ones(64) for part in ("attn_norm", "nextn.enorm")}
    model = make("glm4.5")
    publish(tmp_path / "m.gguf", model, FORMS["glm4.5"], keys=further, tensors=lambda tensors: {**tensors, **more})
    check_computed(tmp_path / "m.gguf", model)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_memory_is_planned_as_for_a_folder(name: str, tmp_path: Path) -> None:
    model = make(name)
    publish(tmp_path / "m.gguf", model, FORMS[name])
    model.save_pretrained(tmp_path / "folder")
    engine = EngineConfig(page_size=16, kv_pages=64)
    of_file, of_folder = (
        plan_rank(ModelConfig(model=str(tmp_path / each), decoder="library", dtype="float32"), engine, 512)
        for each in ("m.gguf", "folder")
    )
    assert (of_file.weights, of_file.geometry) == (of_folder.weights, of_folder.geometry)
    assert of_file.memory.weight_bytes == of_folder.memory.weight_bytes
    assert of_file.memory.page_bytes == of_folder.memory.page_bytes
    assert of_file.terms.spec.max_positions == 512


Change = Callable[[dict[str, Any]], dict[str, Any]]


def without(*names: str) -> Change:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("name", "keys", "change", "message"),
    [
        ("gemma3", {"attention.scale": 0.1}, dict, "keys that are not supported: gemma3.attention.scale$"),
        ("gemma3", {"a": 1, "b": 1, "c": 1, "d": 1}, dict, "gemma3.a, gemma3.b, gemma3.c and 1 more"),
        ("gemma3", {"attention.head_count_kv": [2, 2, 1, 1]}, dict, "head_count_kv differs from layer to layer"),
        ("gemma3", {"attention.sliding_window": None}, dict, "attention.sliding_window. has to be .* but is missing"),
        ("gemma3", {"attention.key_length": 16}, dict, "attention.value_length 32 must equal the key length 16"),
        ("gemma3", {"embedding_length": 32}, dict, r"tensor \S+ should make \S+ of shape \[.*\], and makes \["),
        ("gemma3", {"rope.scaling.type": "su"}, dict, "rope.scaling.type 'su' is not supported"),
        ("gemma3", {"rope.scaling.attn_factor": 1.5}, dict, "rope.scaling.attn_factor 1.5 is not supported"),
        ("gemma3", {}, without("blk.3.ffn_up.weight"), "lacks tensors: blk.3.ffn_up.weight$"),
        ("gemma3", {}, lambda all: {**all, "dense_2.weight": np.ones(8)}, "does not read: dense_2.weight$"),
        ("qwen3-moe", {"expert_used_count": None}, dict, "expert_used_count. has to be .* but is missing"),
        ("qwen3-moe", {}, without("blk.0.ffn_up_exps.weight"), "lacks tensors: blk.0.ffn_up_exps.weight$"),
        ("gpt-oss", {}, without("blk.0.attn_sinks.weight"), "lacks tensors: blk.0.attn_sinks.weight$"),
        ("deepseek-v3", {"expert_gating_func": 4}, dict, "expert_gating_func 4 is not supported"),
        ("deepseek-v3", {"attention.key_length_mla": 8}, dict, "keys of 8 must be wider than the rotated 8"),
        ("glm4.5", {"nextn_predict_layers": 4}, dict, "nextn_predict_layers 4 must be below block_count"),
        ("glm4.5", {"rope.dimension_count": 32}, dict, "rope.dimension_count 32 must equal the head size 16"),
        ("phi4-mini", {"rope.scaling.attn_factor": 1.0}, dict, r"attn_factor 1 should be 1\.\d+"),
        ("ministral3", {"rope.scaling.type": "none"}, dict, "temperature_scale and yarn have to be there together"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(
    name: str, keys: dict[str, Any], change: Change, message: str, tmp_path: Path
) -> None:
    publish(tmp_path / "m.gguf", make(name), FORMS[name], keys=keys, tensors=change)
    source = resolve_source(str(tmp_path / "m.gguf"))
    with pytest.raises(ConfigError, match=message) as raised:
        check_files(source, model_spec(source))
    assert str(raised.value).isprintable()


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "falcon", {"block_count": 1}, {"token_embd.weight": np.zeros((8, 32))})
    with pytest.raises(ConfigError, match=r"compute GGUF files of .*; GGUF architecture 'falcon' is not supported"):
        model_spec(resolve_source(str(tmp_path / "m.gguf")))
