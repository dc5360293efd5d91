"""How byte-level tokenizers out of GGUF files split a text."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from headrace.core.types.errors import ConfigError
from headrace.engine.model.source import ModelSource
from headrace.engine.model.tokenizer_store import convert
from tests.engine.gguf_files import write_gguf

TEXT = "It's x日本 12345!abc +"


def tokenizer_file(path: Path, name: str) -> ModelSource:
    """A GGUF file with a tokenizer of bytes that splits as this name says."""
    keys = {
        ".tokenizer.ggml.model": "gpt2",
        ".tokenizer.ggml.pre": name,
        ".tokenizer.ggml.tokens": [*bytes_to_unicode().values(), "ab"],
        ".tokenizer.ggml.merges": ["a b"],
        ".tokenizer.ggml.eos_token_id": 0,
    }
    [file] = write_gguf(path / "t.gguf", "llama", keys, {"token_embd.weight": np.zeros((257, 8))})
    return ModelSource("gguf", file)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("deepseek-v3", ["It", "'s", " x", "日本", " ", "123", "45", "!abc", " +"]),
        ("glm4", ["It", "'s", " x日本", " ", "123", "45", "!abc", " +"]),
        ("llama-bpe", ["It", "'s", " x日本", " ", "123", "45", "!abc", " +"]),
        ("gpt-2", ["It", "'s", " x日本", " 12345", "!", "abc", " +"]),
    ],
)
def test_a_text_is_split_as_the_file_says(name: str, expected: list[str], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(convert(tokenizer_file(tmp_path, name)).backend)
    spans = [span for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert [TEXT[start:end] for start, end in spans] == expected


def test_an_unknown_split_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre 'kimi-k2' is not supported; supported are chatglm-bpe, "
    ):
        convert(tokenizer_file(tmp_path, "kimi-k2"))
