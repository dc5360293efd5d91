"""Incremental detokenization and stop strings, against brute force."""

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from headrace.text.detokenizer import REPLACEMENT, Detokenizer, StopMatcher, TextStream
from headrace.text.tokenizer import Tokenizer


class Bytes:
    """Every token is one byte; 256 is a special token without text."""

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def test_text_of_characters_over_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    text = "hello world, naïve café ✓ 🙂 日本語\n\n." * 5
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert detokenizer.flush() == ""


@given(st.text(), st.text(max_size=20))
@example("", REPLACEMENT)
@example("a", REPLACEMENT)
@example(REPLACEMENT, REPLACEMENT)
def test_any_text_comes_back_after_any_prompt(text: str, prompt: str) -> None:
    detokenizer = Detokenizer(Bytes(), list(prompt.encode()))
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) + detokenizer.flush() == text


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([0xF0, 0x9F, 0x99, 0x82, 0xE2, 0xC3])), max_size=120))
def test_invalid_bytes_come_out_as_decoding_them_at_once(tokens: list[int]) -> None:
    detokenizer = Detokenizer(Bytes())
    text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
    assert text == Bytes().decode(tokens)


def test_a_prompt_that_ends_inside_a_character() -> None:
    smile = "🙂".encode()
    detokenizer = Detokenizer(Bytes(), list(b"hi " + smile[:2]))
    assert "".join(detokenizer.push(byte) for byte in smile[2:] + b"!") == "🙂!"


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the text is cut: before the stop string that ends first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return min(found)
    return None


SHORT = st.text(alphabet="ab\n", min_size=1, max_size=4)


@given(st.lists(st.text(alphabet="ab\n", max_size=5), max_size=12), st.lists(SHORT, max_size=4), st.booleans())
def test_stop_strings_cut_where_brute_force_does_whatever_the_parts(
    parts: list[str], stops: list[str], keep: bool
) -> None:
    matcher = StopMatcher(stops, keep=keep)
    given_out = ""
    stopped = False
    for index, part in enumerate(parts):
        text, stopped = matcher.push(part)
        given_out += text
        if stopped:
            break
        so_far = "".join(parts[: index + 1])
        withheld = so_far[len(given_out) :]
        assert so_far.startswith(given_out)
        assert not withheld or any(stop.startswith(withheld) for stop in stops), "held back without need"
    if not stopped:
        given_out += matcher.flush()
    whole = "".join(parts)
    end = first_stop(whole, stops)
    assert stopped == (end is not None)
    if end is not None and keep:
        end += len(matcher.found)
    assert given_out == (whole if end is None else whole[:end])
    assert (matcher.found in stops) == stopped
    assert not stopped or (given_out + matcher.found * (not keep)).endswith(matcher.found)


@given(st.text(alphabet="ab ", max_size=60), st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), max_size=2))
def test_a_stream_of_tokens_stops_like_its_text(text: str, stops: list[str]) -> None:
    stream = TextStream(Bytes(), b"", stops)
    out = ""
    for token in text.encode():
        out += stream.push(token)
        if stream.stopped:
            break
    else:
        out += stream.flush()
    end = first_stop(text, stops)
    assert (out, stream.stopped) == ((text, False) if end is None else (text[:end], True))


def test_end_tokens_leave_no_text_and_release_what_was_held() -> None:
    stream = TextStream(Bytes(), b"", ["ab"], frozenset({ord("!")}))
    assert [stream.push(token) for token in b"xa"] == ["x", ""]
    assert stream.push(ord("!")) == "a"
    assert stream.stopped


def test_what_ends_the_text_is_part_of_it_if_wanted() -> None:
    stream = TextStream(Bytes(), b"", ["ab"], frozenset({ord("!")}), keep=True)
    assert [stream.push(token) for token in b"xa"] == ["x", ""]
    assert stream.push(ord("!")) == "a!"
    assert (stream.stopped, stream.ended_by) == (True, ord("!"))
    stream = TextStream(Bytes(), b"", ["ab", "a!"], frozenset({ord("!")}), keep=True)
    assert "".join(stream.push(token) for token in b"xa!") == "xa!"
    assert (stream.stopped, stream.ended_by) == (True, "a!")


def test_nothing_stops_before_min_tokens() -> None:
    stream = TextStream(Bytes(), b"", ["a"], frozenset({ord("!")}), min_tokens=3)
    assert "".join(stream.push(token) for token in b"a!") == "a!"
    assert not stream.stopped
    assert stream.push(ord("a")) == ""
    assert stream.stopped
