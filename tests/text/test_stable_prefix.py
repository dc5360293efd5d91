"""Tokens of texts that grow: what is computed early is what the whole text has; where it is not, only time is lost."""

import os
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from headrace.server.config.load import load
from headrace.text.chat_template import ChatTemplate
from headrace.text.stable_prefix import common_length
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.fakes import tiny_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog's 1234567890 tails, doesn't it?\r\n\n",
    "naïve café über straße 中文字符 日本語 🙂🙃 e\u0301a\u0300  tabs\tand   spaces",
    "def main(args: list[str]) -> int:\n    return 0\n\n# 3.14159 <|end|>",
]
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def trained(*, byte_level: bool) -> Tokenizer:
    """A BPE that was trained on the corpus: bytes as GPT-2 has them, or composed characters and words."""
    backend = RustTokenizer(models.BPE(unk_token="<unk>"))
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.Metaspace()])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    special = ["<unk>", "<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return Tokenizer(backend, (), ChatTemplate(CHATML, {}))


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "smollm2":
        return load_tokenizer(name, load({}, os.environ).server.cache_dir)
    return tiny_tokenizer() if name == "tiny" else trained(byte_level=name == "bytes")


NAMES = ["tiny", "bytes", "words", "smollm2"]
PARTS = st.one_of(
    st.sampled_from(
        [*CORPUS, "\r", "\n", " ", "  \n", "'", "'s", "0", "12", "\u0301", "\u0327", "<|", "end|>", "中", "🙂"]
    ),
    st.text(max_size=12),
)
TEXTS = st.lists(PARTS, min_size=1, max_size=12).map("".join).filter(lambda text: text.isprintable() or len(text) > 2)


def stable_share(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    whole = tokenizer.encode(text)
    for cut in sorted(cut % (len(text) + 1) for cut in cuts):
        ids, stable = tokenizer.encode_open(text[:cut])
        assert ids == tokenizer.encode(text[:cut])
        assert 0 <= stable <= len(ids)
        assert common_length(ids[:stable], whole) == stable, (text[:cut], text[cut:])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_what_is_stable_at_any_cut_is_what_the_whole_text_begins_with(name: str, text: str, cuts: list[int]) -> None:
    stable_share(tokenizer_of(name), text, cuts)


def test_most_of_a_text_is_stable() -> None:
    for name in NAMES[1:]:
        ids, stable = tokenizer_of(name).encode_open("".join(CORPUS) * 4)
        assert len(ids) - 24 < stable < len(ids)


def test_what_may_become_an_added_token_is_not_stable() -> None:
    tokenizer = tokenizer_of("bytes")
    ids, stable = tokenizer.encode_open("the lazy dog jumps <|en")
    assert common_length(ids[:stable], tokenizer.encode("the lazy dog jumps <|end|>")) == stable


@pytest.mark.parametrize("name", NAMES[1:])
def test_what_is_stable_of_a_conversation_does_not_change_with_more_messages(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = [{"role": ("user", "assistant")[n % 2], "content": CORPUS[n % 3] + " "} for n in range(6)]
    for count in range(1, 6):
        ids, stable = tokenizer.encode_open_chat(said[:count])
        assert ids == tokenizer.encode_chat(said[:count])
        assert common_length(ids[:stable], tokenizer.encode_chat(said)) == stable
        assert stable > len(tokenizer.encode_chat(said[: count - 1])) - 24
