"""Model files with values of wrong types, or impossible ones: refused in one line that names file and field."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.engine.model.checkpoint import INDEX, SafetensorsCheckpoint
from headrace.engine.model.config import spec_from_config
from headrace.engine.model.families import BY_ARCHITECTURE
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.gguf_spec import spec_from_gguf
from headrace.engine.model.source import ModelSource, eos_token_ids
from headrace.engine.model.tokenizer_store import convert

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0,
        "mscale_all_dim": 0.5, "attention_factor": 1.5, "beta_fast": 32, "beta_slow": 1, "truncate": True}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "sliding_window": 512, "use_sliding_window": True, "rope_scaling": YARN, "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [0],
}  # fmt: skip
LATENTS = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "rope_interleave": True, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.5, "topk_method": None,
    "scoring_func": None,
}  # fmt: skip
VALID = {**SIZES, **EXPERTS, **LATENTS}
LLAMA = {**VALID, "architectures": ["LlamaForCausalLM"]}
KEYS: dict[str, Any] = {
    "general.architecture": "llama", "llama.embedding_length": 32, "llama.feed_forward_length": 64,
    "llama.block_count": 1, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
    "llama.attention.key_length": 16, "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.sliding_window": 64, "llama.rope.freq_base": 1e4, "llama.rope.dimension_count": 16,
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.expert_count": 0,
    "llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.yarn_beta_fast": 32.0,
    "llama.rope.scaling.yarn_beta_slow": 1.0, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers(-(10**30), 10**30)
    | st.sampled_from([1 << 31, 1 << 63, 10**400, -(10**400)])
    | st.floats()
    | st.sampled_from(["", "1", "yarn", "llama3", "linear", "a\nb", "\ud800"])
    | st.text(max_size=5)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)


def one_line(error: ConfigError) -> None:
    assert str(error)
    assert str(error).isprintable()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": 5}, "'architectures' has to be a list of names, got 5"),
        ({"architectures": [5]}, r"'architectures' has to be a list of names, got \[5\]"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' has to be a list of names"),
        ({"architectures": None, "model_type": ["llama"]}, "'model_type' has to be a name"),
        ({"rms_norm_eps": None}, "config.json: 'rms_norm_eps' has to be a number above 0, at most 1e.15, got null"),
        ({"rms_norm_eps": "1e-6"}, "'rms_norm_eps' has to be a number above 0, at most 1e.15, got '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' has to be a number above 0"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' has to be a number above 0, at most 1e.15, got 0"),
        ({"hidden_size": 64.0}, "'hidden_size' has to be a whole number from 1 to 2147483647, got 64.0"),
        ({"hidden_size": True}, "'hidden_size' has to be a whole number from 1 to 2147483647, got true"),
        ({"num_attention_heads": 0}, "'num_attention_heads' has to be"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' has to be a whole number from 1 to 10000"),
        ({"vocab_size": -1}, "'vocab_size' has to be"),
        ({"head_dim": 10**30}, "'head_dim' has to be"),
        ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' has to be true or false, got 'false'"),
        ({"rope_theta": "10000"}, "'rope_theta' has to be a number above 1"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' has to be an object, got 'yarn'"),
        ({"rope_parameters": [1]}, "'rope_parameters' has to be an object"),
        ({"rope_scaling": {"type": "linear"}}, "'rope_scaling.factor' has to be .*, but is missing"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "'rope_scaling.factor' has to be a number"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0.5}}, "'rope_scaling.original_max_position"),
        ({"rope_scaling": {**YARN, "rope_type": "llama3", "high_freq_factor": 1}}, "high_freq_factor 1.0 must be"),
    ],
)
def test_mistakes_in_a_config_are_named(change: dict[str, Any], words: str) -> None:
    spec_from_config(LLAMA)
    with pytest.raises(ConfigError, match=words) as raised:
        spec_from_config({**LLAMA, **change})
    one_line(raised.value)


PLACES = [*VALID, "architectures", "model_type", *(("rope_scaling", key) for key in YARN)]


@pytest.mark.parametrize("architecture", BY_ARCHITECTURE)
@settings(max_examples=100, deadline=None)
@given(mistakes=st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
def test_any_value_anywhere_in_a_config_is_read_or_refused(architecture: str, mistakes: list[tuple[Any, Any]]) -> None:
    config = {**VALID, "architectures": [architecture], "rope_scaling": dict(YARN)}
    spec_from_config(config)
    for place, value in mistakes:
        if isinstance(place, str):
            config[place] = value
        elif isinstance(config["rope_scaling"], dict):
            config["rope_scaling"][place[1]] = value
    try:
        spec_from_config(config)
    except ConfigError as error:
        one_line(error)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("gguf") / "a.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", 5, "a.gguf: 'general.architecture' has to be a name, got 5"),
        ("llama.embedding_length", "32", "a.gguf: 'llama.embedding_length' has to be a whole number"),
        ("llama.attention.head_count", 0, "'llama.attention.head_count' has to be"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "rms_epsilon' has to be a number above 0"),
        ("llama.block_count", True, "'llama.block_count' has to be"),
        ("llama.rope.freq_base", "x", "'llama.rope.freq_base' has to be"),
        ("llama.rope.scaling.type", 3, "'llama.rope.scaling.type' has to be a name"),
        ("llama.context_length", None, "'llama.context_length' has to be"),
    ],
)
def test_mistakes_in_gguf_metadata_are_named(gguf: GgufFile, key: str, value: object, words: str) -> None:
    gguf.metadata = {**KEYS, key: value}
    with pytest.raises(ConfigError, match=words) as raised:
        spec_from_gguf(gguf)
    one_line(raised.value)


@settings(max_examples=300, deadline=None)
@given(mistakes=st.dictionaries(st.sampled_from(list(KEYS)), VALUES, min_size=1, max_size=3))
def test_any_value_anywhere_in_gguf_metadata_is_read_or_refused(gguf: GgufFile, mistakes: dict[str, Any]) -> None:
    gguf.metadata = dict(KEYS)
    assert spec_from_gguf(gguf).layers == 1
    gguf.metadata = KEYS | mistakes
    try:
        spec_from_gguf(gguf)
    except ConfigError as error:
        one_line(error)


@pytest.mark.parametrize("value", [True, "2", 2.0, -1, [2, "3"], {"a": 1}, 1 << 40])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ids_that_are_none_are_named(tmp_path: Path, name: str, value: object) -> None:
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=f"{name}: 'eos_token_id' has to be a token id or a list") as raised:
        eos_token_ids(ModelSource("hf", tmp_path))
    one_line(raised.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "has to be an object whose values are texts"),
        ({"a": 1}, "has to be an object whose values are texts"),
        ({"a": "../b.safetensors"}, "names '../b.safetensors', which is no file of the model folder"),
        ({"a": "x/../../b.safetensors"}, "which is no file of the model folder"),
        ({"a": "/b.safetensors"}, "which is no file of the model folder"),
        ({"a": "b\0.safetensors"}, "which is no file of the model folder"),
    ],
)
def test_indexes_name_files_of_their_folder(tmp_path: Path, value: object, words: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": value}))
    with pytest.raises(ConfigError, match=f"{INDEX}: 'weight_map' .*{words}") as raised:
        SafetensorsCheckpoint(tmp_path)
    one_line(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "tokenizer_config.json: 'chat_template' has to be a text"),
        ("tokenizer_config.json", {"chat_template": [1]}, "tokenizer_config.json: 'chat_template' has to be a text"),
        ("tokenizer_config.json", [], "tokenizer_config.json must hold a JSON object"),
        ("tokenizer.json", [], "tokenizer.json must hold a JSON object"),
        ("tokenizer.json", {"model": 5}, "."),
        ("generation_config.json", {"eos_token_id": "x"}, "generation_config.json: 'eos_token_id'"),
    ],
)
def test_mistakes_in_tokenizer_files_are_named(tmp_path: Path, name: str, content: object, words: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        convert(ModelSource("hf", tmp_path))
