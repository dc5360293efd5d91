"""The bound on how few tokens a text has: certain where it is given, and not given where it would not be."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from headrace.text.token_length import TokenBound
from headrace.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ("ab", "Ġa", "ĠĠ", "ĠĠĠĠ", "ÃĤ")
PIECES = ("▁", "▁▁", "▁▁▁▁", "a", "ab", "日本")
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def merged(vocab: dict[str, int], words: tuple[str, ...]) -> models.BPE:
    """BPE in which these words are made of two parts each, of equal length."""
    merges = []
    for word in words:
        half = len(word) // 2
        if len(word) > 1 and word[:half] in vocab and word[half:] in vocab:
            merges.append((word[:half], word[half:]))
        vocab.setdefault(word, len(vocab))
    return models.BPE(vocab=vocab, merges=merges)


def byte_level(**parts: Any) -> RustTokenizer:
    made = RustTokenizer(merged({character: index for index, character in enumerate(ALPHABET)}, WORDS))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def of_ascii_only(**parts: Any) -> RustTokenizer:
    vocab = {character: index for index, character in enumerate(filter(str.isascii, ALPHABET))}
    return byte_level(model=models.BPE(vocab=vocab, merges=[]), **parts)


def with_fallback(**parts: Any) -> RustTokenizer:
    """As models that came with SentencePiece have it."""
    vocab = {name: index for index, name in enumerate(["<unk>", *FALLBACK, "▁", "a", "b", "日", "本"])}
    model = merged(vocab, PIECES)
    model.unk_token, model.fuse_unk, model.byte_fallback = "<unk>", True, True
    made = RustTokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def test_bytes_that_are_dropped_do_not_count() -> None:
    found = bound(of_ascii_only())
    assert found is not None
    assert found.least_tokens("é" * 1000) == 0
    assert found.least_tokens("é" * 1000 + "a" * 6) == 2
    assert found.least_tokens(("é" + "a" * 5) * 30_000) == 30_000


def bound(tokenizer: RustTokenizer) -> TokenBound | None:
    return Tokenizer(tokenizer)._bound


CERTAIN: dict[str, tuple[RustTokenizer, int]] = {
    "byte level": (byte_level(), 5),
    "byte level, NFC": (byte_level(normalizer=normalizers.NFC()), 20),
    "byte level, split": (
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
            )
        ),
        5,
    ),
    "byte level of ASCII": (of_ascii_only(), 5),
    "fallback": (with_fallback(), 12),
    "fallback, Metaspace": (with_fallback(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace()), 12),
    "fallback, NFKC and lower case": (
        with_fallback(
            normalizer=normalizers.Sequence(
                [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("  ", "▁")]
            )
        ),
        12 * 16,
    ),
}
TEXTS = st.lists(
    st.text(max_size=8)
    | st.sampled_from(["ab", " a", "    ", "日本", "<end>", "\U0001d400", "e\u0302\u0301", "\u1112\u1161\u11ab", "İ"]),
    max_size=30,
).map("".join)


@pytest.mark.parametrize("name", CERTAIN)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer, most = CERTAIN[name]
    found = bound(tokenizer)
    assert found is not None
    assert found.longest == most
    text = text.encode(errors="ignore").decode()
    least = found.least_tokens(text)
    assert len(tokenizer.encode(text, add_special_tokens=False)) >= least
    if not found.dropped:
        assert least == math.ceil(len(text.encode()) / most)


def with_strip(**sides: bool) -> RustTokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<next>", special=True, **sides)])
    return made


def with_some_fallback() -> RustTokenizer:
    vocab = {name: index for index, name in enumerate(["<unk>", "a", *FALLBACK[:128]])}
    return RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))


def splitting(*parts: Any) -> RustTokenizer:
    return byte_level(pre_tokenizer=pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(use_regex=False)]))


UNCERTAIN: dict[str, tuple[RustTokenizer, str]] = {
    "spaces are dropped": (splitting(pre_tokenizers.WhitespaceSplit()), " " * 1000),
    "words are dropped": (splitting(pre_tokenizers.Split("a", "removed")), "a" * 1000),
    "a token takes the spaces before it": (with_strip(lstrip=True), " " * 1000 + "<next>"),
    "a token takes the spaces after it": (with_strip(rstrip=True), "<next>" + " " * 1000),
    "spaces are stripped": (byte_level(normalizer=normalizers.Strip()), " " * 1000),
    "spaces become one": (byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")), " " * 1000),
    "a word is deleted": (byte_level(normalizer=normalizers.Replace("a", "")), "a" * 1000),
    "accents are stripped": (byte_level(normalizer=normalizers.StripAccents()), "\u0301" * 1000),
    "unknown bytes are dropped": (of_ascii_only(normalizer=normalizers.NFC()), "é" * 1000),
    "unknown characters become one token": (with_some_fallback(), "é" * 1000),
    "a long word becomes one token": (
        RustTokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]")),
        "a" * 1000,
    ),
    "unknown words become one token": (
        RustTokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
        "b" * 1000,
    ),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_where_a_text_can_vanish_there_is_no_bound(name: str) -> None:
    tokenizer, text = UNCERTAIN[name]
    assert len(tokenizer.encode(text, add_special_tokens=False)) <= 1
    assert bound(tokenizer) is None
