"""Streams of random tokens, for every kind of decoder: the parts join to the text of the whole, in linear time."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.byte_fallback import BYTE_TOKENS, REPLACEMENT
from headrace.text.detokenizer import Detokenizer, TextStream
from headrace.text.tokenizer import Tokenizer
from tests.text.decoders import MAKERS, byte_fallback, byte_level, unigram

TOKENIZERS = {name: make() for name, make in MAKERS.items()}
BYTE_KINDS = ["byte fallback", "byte fallback, strip", "unigram, byte fallback"]
every_decoder = pytest.mark.parametrize("name", TOKENIZERS)


def ids_of(name: str, most: int) -> st.SearchStrategy[list[int]]:
    """Ids of a tokenizer, of which some are special and one is unknown; often the same again, and often byte tokens
    that begin characters."""
    tokenizer = TOKENIZERS[name]
    size = tokenizer.vocab_size
    bytes_of = [
        tokenizer._backend.token_to_id(BYTE_TOKENS[byte]) for byte in (0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x80, 0x41)
    ]
    single = st.one_of(
        st.integers(0, size),
        st.integers(max(0, size - 12), size),
        st.sampled_from([each for each in bytes_of if each] or [0]),
    )
    runs = st.tuples(st.lists(single, min_size=1, max_size=5), st.integers(1, 40)).map(lambda run: run[0] * run[1])
    return st.lists(runs, max_size=8).map(lambda parts: [token for part in parts for token in part][:most])


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()


@every_decoder
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_joins_to_the_text_of_the_whole(name: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(name, 300))
    tokenizer = TOKENIZERS[name]
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.decode_long(ids) == tokenizer.decode(ids)


@every_decoder
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_after_a_prompt_it_is_what_the_whole_has_more_than_the_prompt(name: str, data: st.DataObject) -> None:
    prompt, ids = data.draw(ids_of(name, 60)), data.draw(ids_of(name, 60))
    tokenizer = TOKENIZERS[name]
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    end = len(before) if whole.startswith(before) else len(before) - 1  # it ends within a character
    assert streamed(tokenizer, ids, prompt) == whole[end:]


class Counted:
    """A decoder that counts the tokens which it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decoded = 0
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special=skip_special)


@every_decoder
def test_no_stream_takes_more_than_linear_time(name: str) -> None:
    """Of one and the same token: never a whole character, never a text, always the middle of two."""
    tokenizer = TOKENIZERS[name]
    for token in range(tokenizer.vocab_size + 1):
        counted = Counted(tokenizer)
        detokenizer = Detokenizer(counted, [token] * 40)
        held = 0
        for _ in range(200):
            held += 1 - len(detokenizer.push(token))
        assert counted.decoded < 200 * (Detokenizer.WINDOW + 2 * Detokenizer.KEEP) + 400, token
        assert len(detokenizer._ids) <= Detokenizer.WINDOW


def test_nothing_that_is_certain_is_held_back() -> None:
    """In a stream of bytes that are no text, too: all but the last character is given."""
    for tokenizer in (byte_level(), byte_fallback(strip=True)):
        detokenizer = Detokenizer(tokenizer)
        byte = tokenizer.vocab_size - 200
        given = 0
        for count in range(1, 500):
            given += len(detokenizer.push(byte))
            assert given >= len(tokenizer.decode([byte] * count)) - 1


@pytest.mark.parametrize(
    "text", ["日本語", "ok 🤗 done", "日本語のテキストを書きます", "🤗" * 30, "a\N{REPLACEMENT CHARACTER}b日", "नमस्ते"]
)
@pytest.mark.parametrize("name", BYTE_KINDS)
def test_characters_of_byte_tokens_come_one_by_one(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer._backend.token_to_id(BYTE_TOKENS[byte]) for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer)
    parts = [part for token in ids if (part := detokenizer.push(token))]
    assert "".join([*parts, detokenizer.flush()]) == text == tokenizer.decode(ids)
    assert len(parts) >= len(text) - 1


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xE6, 0x97, 0xA5, 0xF0, 0x9F])), max_size=60))
@pytest.mark.parametrize("name", BYTE_KINDS)
def test_bytes_that_are_no_characters_are_decoded_as_by_python(name: str, run: list[int]) -> None:
    """Characters around them stay: those of a text that is cut within one, too."""
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer._backend.token_to_id(BYTE_TOKENS[byte]) for byte in run]
    expected = bytes(run).decode(errors="replace")
    if name.endswith("strip"):
        expected = expected.removeprefix(" ")
    assert tokenizer.decode(ids) == expected
    assert b"".join(tokenizer.piece_bytes(token) for token in ids) == bytes(run)
    if REPLACEMENT not in expected:
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_stop_strings_are_found_in_byte_tokens() -> None:
    tokenizer = byte_fallback(strip=True)
    ids = [tokenizer._backend.token_to_id(BYTE_TOKENS[byte]) for byte in "日本語のテキスト".encode()]
    stream = TextStream(tokenizer, tokenizer.encode("a"), ["のテ"])
    out = ""
    for token in ids:
        out += stream.push(token)
        if stream.stopped:
            break
    assert (out, stream.ended_by) == ("日本語", "のテ")


def test_pieces_join_to_the_text() -> None:
    """Each token by itself has lost its space with decoders that leave out the first one."""
    for name in ("byte fallback, strip", "unigram"):
        tokenizer = TOKENIZERS[name]
        ids = [tokenizer._backend.token_to_id(piece) for piece in ("a", "▁the", "ing", "▁日", "語")]
        assert [tokenizer.piece(token) for token in ids] == ["a", " the", "ing", " 日", "語"]
        assert b"".join(map(tokenizer.piece_bytes, ids)).decode() == tokenizer.decode(ids)


def test_a_byte_token_is_text_where_the_decoder_does_not_know_it() -> None:
    tokenizer = unigram(fallback=False)
    tokenizer._backend.add_tokens(["<0x41>"])
    made = Tokenizer(tokenizer._backend)
    assert made.piece_bytes(made.vocab_size - 1) == b"<0x41>"


@every_decoder
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_characters_before_a_token_are_those_of_the_text_whatever_is_held_back(name: str, data: st.DataObject) -> None:
    """After a prompt, too, without which a first word may have no space before it."""
    prompt, ids = data.draw(ids_of(name, 20)), data.draw(ids_of(name, 40))
    stop = data.draw(st.sampled_from(["aaaaaaaa", "ing▁", " \N{REPLACEMENT CHARACTER}"]))
    plain, held = TextStream(TOKENIZERS[name], prompt), TextStream(TOKENIZERS[name], prompt, [stop])
    text = ""
    for token in ids:
        assert plain.chars == len(text)
        assert held.chars == plain.chars
        text += plain.push(token)
        held.push(token)
        if held.stopped:
            break
