"""Weights that would be computed wrong: refused by the tensor's name, whatever the configuration says of them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import load_file, save_file

from headrace.core.types.errors import ConfigError
from headrace.engine.model.checkpoint import INDEX, SINGLE, open_checkpoint
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.gguf_header import MAX_ITEMS
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.model.tensor_names import model_tensors
from tests.engine.model.refusals import check, refused
from tests.engine.models import CONFIGS, Saved, make_runner, save_model

Models = Callable[[str], Saved]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def changed(folder: Path, target: Path, tensors: Mapping[str, torch.Tensor | None]) -> Path:
    """A copy of a model folder with other tensors; None: without."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    stored = {**load_file(target / SINGLE), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, target / SINGLE)
    return target


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tensors_of_a_model_are_those_that_transformers_writes(saved: Models, name: str) -> None:
    source = resolve_source(str(saved(name).folder))
    spec = load_spec(source)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(source.path / SINGLE).items()}
    assert model_tensors(spec) == stored
    check(source.path)


UNSCALED = [torch.uint8, torch.int32, torch.int64, torch.bool]
WITHOUT = {
    None: [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, *UNSCALED],
    "SCB": [torch.float8_e4m3fn, torch.float8_e5m2, *UNSCALED],
    "weight_scale_inv": [torch.int8, *UNSCALED],
    "weight_scale": UNSCALED,
}


@pytest.mark.parametrize(("scale", "dtype"), [(scale, dtype) for scale, dtypes in WITHOUT.items() for dtype in dtypes])
def test_tensors_that_need_scales_are_refused_by_name(
    saved: Models, tmp_path: Path, dtype: torch.dtype, scale: str | None
) -> None:
    """With scales beside them that are no scales of theirs, and without."""
    scales = {} if scale is None else {QUERY.replace("weight", scale): torch.ones(1)}
    folder = changed(saved("llama").folder, tmp_path, {QUERY: torch.ones(48, 48).to(dtype), **scales})
    words = r"q_proj\.weight.* is stored as \w+, which is (a weight only together with its scale|no weight)|has tensors"
    refused(folder, words)
    with pytest.raises(ConfigError, match=words):
        make_runner(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "lm_head.bias",
        "layers.0.attention.wq.weight",
        "x\n" * 200,
    ],
)
def test_tensors_that_nobody_reads_are_refused(saved: Models, tmp_path: Path, name: str) -> None:
    folder = changed(saved("llama").folder, tmp_path, {name: torch.ones(2)})
    refused(folder, "has tensors that a llama model of this configuration lacks: ")
    with pytest.raises(ConfigError, match="has tensors that a llama model"):
        make_runner(folder)


def test_what_may_be_there_unread(saved: Models, tmp_path: Path) -> None:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(3)}
    further = {f"model.layers.3.{name}": torch.ones(2) for name in ("eh_proj.weight", "enorm.weight", "mlp.x.weight")}
    check(changed(saved("llama").folder, tmp_path / "a", {**buffers, **further}))
    folder = changed(saved("deepseek-v3").folder, tmp_path / "c", {"model.layers.3.mlp.x.weight": torch.ones(2)})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    refused(folder, "has tensors that a deepseek_v3 model")
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    check(folder)
    tied = next(name for name, config in CONFIGS.items() if config.tie_word_embeddings)
    check(changed(saved(tied).folder, tmp_path / "b", {"lm_head.weight": torch.ones(2)}))


def test_a_missing_tensor_is_found_by_a_check(saved: Models, tmp_path: Path) -> None:
    refused(changed(saved("llama").folder, tmp_path / "a", {QUERY: None}), f"{QUERY} of shape .* is missing")
    refused(changed(saved("llama").folder, tmp_path / "b", {QUERY: torch.ones(3, 3)}), f"{QUERY} should have shape")


def test_model_safetensors_is_read_alone(saved: Models, tmp_path: Path) -> None:
    """Copies beside it, and an old index, are not."""
    folder = changed(saved("llama").folder, tmp_path, {})
    tensors = load_file(folder / SINGLE)
    others = {name: tensor + 1 for name, tensor in tensors.items()}
    save_file(others, folder / "zzz.safetensors")
    save_file(others, folder / "model-00001-of-00001.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    check(folder)
    source = resolve_source(str(folder))
    read = open_checkpoint(source, load_spec(source)).read(QUERY, (48, 48))
    assert torch.equal(read, tensors[QUERY])


def test_a_name_in_two_files_is_refused(saved: Models, tmp_path: Path) -> None:
    folder = changed(saved("llama").folder, tmp_path, {})
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    save_file(tensors, folder / "a.safetensors")
    check(folder)
    save_file({QUERY: tensors[QUERY]}, folder / "b.safetensors")
    refused(folder, f"a.safetensors and b.safetensors both have a tensor '{QUERY}'")
    files = {**dict.fromkeys(tensors, "a.safetensors"), QUERY: "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    refused(folder, f"a.safetensors and b.safetensors both have a tensor '{QUERY}'")


def test_shards_are_read_without_their_index_too(saved: Models, tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama"], tmp_path, "60KB").folder
    (folder / INDEX).unlink()
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    check(folder)
    next(folder.glob("model-00002-of-*")).unlink()
    refused(folder, "is missing in")


def test_a_shard_may_be_missing_where_its_layers_are_not_read(tmp_path: Path) -> None:
    folder = save_model(CONFIGS["llama"], tmp_path, "60KB").folder
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    needed = {file for name, file in files.items() if ".layers.1." not in name}
    alone = sorted(set(files.values()) - needed)
    assert alone
    (folder / alone[0]).unlink()
    make_runner(folder, layers=range(1))
    refused(folder, f"{alone[0]} cannot be read")


def write_gguf(path: Path, tensors: Sequence[tuple[str, np.ndarray[Any, Any], Any]]) -> Path:
    writer = GGUFWriter(path, "llama")
    sizes = {"embedding_length": 32, "feed_forward_length": 64, "block_count": 1, "attention.head_count": 2}
    for key, value in {**sizes, "context_length": 128}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, data, kind in tensors:
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EMBEDDING = ("token_embd.weight", np.zeros((10, 32), np.float32), GGMLQuantizationType.F32)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"])
def test_kinds_of_gguf_that_cannot_be_expanded_are_one_line(tmp_path: Path, kind: str) -> None:
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = np.zeros((4, size), np.uint8)
    path = write_gguf(tmp_path / "a.gguf", [EMBEDDING, ("blk.0.ffn_up.weight", data, GGMLQuantizationType[kind])])
    refused(path, f"tensor blk.0.ffn_up.weight is of kind {kind}, which cannot be expanded")


@pytest.mark.parametrize("name", ["blk.0.attn_q.scale", "blk.1.attn_norm.weight", "blk.0.attn_norm.bias", "x"])
def test_tensors_of_gguf_that_nobody_reads_are_refused(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "a.gguf", [EMBEDDING, (name, np.zeros(32, np.float32), None)])
    refused(path, f"has tensors that a llama model of this configuration lacks: '{name}'")


def test_a_missing_tensor_of_gguf_is_found_by_a_check(tmp_path: Path) -> None:
    refused(write_gguf(tmp_path / "a.gguf", [EMBEDDING]), r"\(output_norm.weight\) of shape \[32\] is missing")


def header(*entries: bytes, tensors: bytes = b"", count: int = 0) -> bytes:
    numbers = count.to_bytes(8, "little") + len(entries).to_bytes(8, "little")
    return b"GGUF" + (3).to_bytes(4, "little") + numbers + b"".join(entries) + tensors + bytes(64)


def text(value: str) -> bytes:
    return len(value).to_bytes(8, "little") + value.encode()


def array(name: str, kind: int, items: bytes, count: int) -> bytes:
    numbers = (9).to_bytes(4, "little") + kind.to_bytes(4, "little") + count.to_bytes(8, "little")
    return text(name) + numbers + items


def test_long_arrays_of_gguf_metadata_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(array("a", 0, bytes(MAX_ITEMS), MAX_ITEMS)))
    assert GgufFile(path).metadata == {"a": (MAX_ITEMS,)}
    path.write_bytes(header(array("a", 0, bytes(MAX_ITEMS + 1), MAX_ITEMS + 1)))
    with pytest.raises(ConfigError, match=f"a metadata array of {MAX_ITEMS + 1} items; at most {MAX_ITEMS}"):
        GgufFile(path)


def test_names_twice_in_gguf_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(header(array("a", 0, b"", 0), array("a", 0, b"", 0)))
    with pytest.raises(ConfigError, match="two metadata keys have the name 'a'"):
        GgufFile(path)
    tensor = text("t") + (1).to_bytes(4, "little") + (8).to_bytes(8, "little") + bytes(4) + bytes(8)
    path.write_bytes(header(tensors=tensor * 2, count=2))
    with pytest.raises(ConfigError, match="two tensors have the name 't'"):
        GgufFile(path)
