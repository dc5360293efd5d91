"""GGUF models in several files, as llama.cpp's gguf-split makes them."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.engine.model.checkpoint import check_files
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.source import load_spec, resolve_source
from tests.engine.gguf_files import write_gguf
from tests.engine.model.refusals import refused
from tests.engine.models import Prompt, make_runner, random_tokens

KEYS: dict[str, Any] = {
    "embedding_length": 64, "feed_forward_length": 96, "block_count": 2, "attention.head_count": 4,
    "context_length": 512, "attention.layer_norm_rms_epsilon": 1e-5, ".general.name": "small",
}  # fmt: skip
SHAPES = {
    "token_embd": (199, 64), "output_norm": (64,),
    **{
        f"blk.{layer}.{name}": shape
        for layer in range(2)
        for name, shape in {
            "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 64),
            "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96),
        }.items()
    },
}  # fmt: skip
FIRST, SECOND, THIRD = (f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3))


def tensors(seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {f"{name}.weight": generator.normal(0, 0.2, shape) for name, shape in SHAPES.items()}


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with a model in three parts."""
    folder = tmp_path / "parts"
    folder.mkdir()
    assert len(write_gguf(folder / "m.gguf", "llama", KEYS, tensors(), part_tensors=8)) == 3
    return folder


def test_any_part_and_the_folder_name_the_model(parts: Path, tmp_path: Path) -> None:
    [whole] = write_gguf(tmp_path / "whole.gguf", "llama", KEYS, tensors())
    prompt = Prompt(1, random_tokens(20), [3, 1], 16)
    expected = make_runner(whole).execute(prompt.chunks(20))[0][0].logprob
    for name in ("", FIRST, SECOND, THIRD):
        source = resolve_source(str(parts / name))
        assert source.path == parts / FIRST
        assert load_spec(source) == load_spec(resolve_source(str(whole)))
        check_files(source, load_spec(source))
    runner = make_runner(parts / SECOND)
    assert runner.execute(prompt.chunks(20))[0][0].logprob == expected
    assert runner.fingerprint == make_runner(whole).fingerprint
    both, one = GgufFile(parts / THIRD), GgufFile(whole)
    assert both.tensors.keys() == one.tensors.keys()
    assert all(np.array_equal(both.read(name), one.read(name)) for name in one.tensors)


def test_a_folder_with_one_file_names_it(tmp_path: Path) -> None:
    [whole] = write_gguf(tmp_path / "whole.gguf", "llama", KEYS, tensors())
    (tmp_path / "mmproj-whole-f16.gguf").write_bytes(b"an image encoder")
    assert resolve_source(str(tmp_path)).path == whole


def test_a_folder_of_several_models_is_refused_with_their_names(parts: Path) -> None:
    write_gguf(parts / "other-Q8_0.gguf", "llama", KEYS, tensors())
    refused(parts, r"has several GGUF models; name one of m-00001-of-00003.gguf, other-Q8_0.gguf")
    assert resolve_source(str(parts / SECOND)).path == parts / FIRST


@pytest.mark.parametrize("missing", [FIRST, SECOND, THIRD])
def test_a_missing_part_is_named(parts: Path, missing: str) -> None:
    (parts / missing).unlink()
    for path in (parts, *parts.iterdir()):
        refused(path, f"{parts} lacks parts of the model: {missing}$")


def test_a_part_under_another_name_says_what_it_is(parts: Path) -> None:
    shutil.move(parts / SECOND, parts / "alone.gguf")
    refused(parts / "alone.gguf", "by its metadata it is part 2 of 3 of a model, by its name part 1 of 1; parts are")
    shutil.copy(parts / THIRD, parts / SECOND)
    refused(parts / FIRST, f"{SECOND} cannot be read .* it is part 3 of 3 of a model, by its name part 2 of 3")
    [whole] = write_gguf(parts / "whole.gguf", "llama", KEYS, tensors())
    shutil.move(whole, parts / SECOND)
    refused(parts / FIRST, f"{SECOND} cannot be read .* it is no part of a model, by its name part 2 of 3")


def test_parts_of_different_models_are_refused(parts: Path, tmp_path: Path) -> None:
    fewer = dict(list(tensors().items())[:-1])
    write_gguf(tmp_path / "m.gguf", "llama", KEYS, fewer, part_tensors=8)
    shutil.copy(tmp_path / THIRD, parts / THIRD)
    refused(parts, f"the 3 parts of {parts / FIRST} have 19 tensors, and the first says 20: they are of different")
    shifted = dict(list(tensors().items())[1:])
    write_gguf(tmp_path / "m.gguf", "llama", KEYS, shifted, part_tensors=7)
    shutil.copy(tmp_path / THIRD, parts / THIRD)
    refused(parts, "tensor 'blk.1.attn_output.weight' is in another part, too: they are of different models")


def test_a_name_with_impossible_numbers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m-00004-of-00003.gguf").write_bytes(b"")
    refused(tmp_path / "m-00004-of-00003.gguf", "is named as part 4 of 3; a model has 1 to 1024 parts")


def test_a_part_alone_in_its_set(tmp_path: Path) -> None:
    """gguf-split also writes sets of one."""
    [whole] = write_gguf(tmp_path / "x.gguf", "llama", KEYS | {".split.count": 1, ".split.no": 0}, tensors())
    shutil.move(whole, tmp_path / "x-00001-of-00001.gguf")
    source = resolve_source(str(tmp_path))
    check_files(source, load_spec(source))
    assert torch.isfinite(torch.from_numpy(GgufFile(source.path).read("output_norm.weight"))).all()
