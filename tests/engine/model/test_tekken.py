"""Mistral's tekken.json beside the algorithm of its package, written out: pieces by a pattern, then pairs by rank."""

import json
from base64 import b64encode
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from headrace.core.types.errors import ConfigError
from headrace.engine.model.source import ModelSource
from headrace.engine.model.tokenizer_store import convert
from headrace.text.tokenizer import Tokenizer
from tests.engine.model.test_tokenizer_store import TEXTS

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
RESERVED = 8  # with places that are kept for others
MERGES = 200


def pieces(text: str) -> list[list[bytes]]:
    return [[bytes([byte]) for byte in piece.encode()] for piece in regex.findall(PATTERN, text)]


def joined(parts: list[bytes], pair: bytes) -> list[bytes]:
    """Parts with those next to each other joined that together are this."""
    found: list[bytes] = []
    for part in parts:
        if found and found[-1] + part == pair and len(found[-1]) < len(pair):
            found[-1] += part
        else:
            found.append(part)
    return found


@cache
def ranks() -> dict[bytes, int]:
    """All bytes, then the pairs that are most frequent in some texts."""
    known = {bytes([byte]): byte for byte in range(256)}
    words = [piece for text in TEXTS for piece in pieces(text)]
    while len(known) < 256 + MERGES:
        count = Counter(one + other for word in words for one, other in pairwise(word) if one + other not in known)
        best = max(sorted(count), key=count.__getitem__)
        known[best] = len(known)
        words = [joined(word, best) for word in words]
    return known


def tokens(text: str) -> list[int]:
    """By rank: of all neighbours those that are the token of lowest rank are joined, the first ones first."""
    known, found = ranks(), []
    for parts in pieces(text):
        while True:
            pairs = [(known.get(one + other, len(known)), at) for at, (one, other) in enumerate(pairwise(parts))]
            rank, at = min(pairs, default=(len(known), 0))
            if rank == len(known):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        found += [known[part] + RESERVED for part in parts]
    return found


def write(folder: Path, **changes: Any) -> None:
    file = {
        "config": {"pattern": PATTERN, "default_vocab_size": RESERVED + 256 + MERGES,
                   "default_num_special_tokens": RESERVED, "version": "v11"},
        "special_tokens": [{"rank": at, "token_str": name, "is_control": True} for at, name in enumerate(SPECIAL)],
        "vocab": [
            {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
            for token, rank in [*ranks().items(), (b"beyond the vocabulary", 256 + MERGES)]
        ],
    }  # fmt: skip
    (folder / "config.json").write_text('{"model_type": "mistral", "eos_token_id": 2}')
    (folder / "tekken.json").write_text(json.dumps({**file, **changes}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    write(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}[/INST]")
    record = convert(ModelSource("hf", folder))
    assert (record.eos_ids, record.chat_template) == ((2,), "{{ messages[0].content }}[/INST]")
    return Tokenizer(Backend.from_str(record.backend))


@pytest.mark.parametrize("text", [text for text in TEXTS if not any(name in text for name in SPECIAL)])
def test_texts_become_the_tokens_of_their_ranks(made: Tokenizer, text: str) -> None:
    assert list(made.encode(text)) == tokens(text)
    assert made.decode(tokens(text)) == text


@settings(max_examples=200)
@given(st.text(max_size=60) | st.text(alphabet="abcdeinrst AB12\n/'", max_size=60))
def test_any_text_does(made: Tokenizer, text: str) -> None:
    assert list(made.encode(text)) == tokens(text)


def test_special_tokens_come_first(made: Tokenizer) -> None:
    assert list(made.encode("<s>[INST]a")) == [1, 3, *tokens("a")]


def test_a_file_without_its_special_tokens_says_what_to_install(tmp_path: Path) -> None:
    write(tmp_path, special_tokens=None)
    with pytest.raises(ConfigError, match=r"its only tokenizer takes a package to read.*mistral-common"):
        convert(ModelSource("hf", tmp_path))


def test_a_malformed_file_is_refused_in_a_line(tmp_path: Path) -> None:
    write(tmp_path, vocab=[{"rank": 0}])
    with pytest.raises(ConfigError, match="token_bytes"):
        convert(ModelSource("hf", tmp_path))
