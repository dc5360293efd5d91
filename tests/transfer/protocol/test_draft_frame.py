"""Draft frames: what is put in comes out, and nothing else is accepted."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.requests.draft import DTYPE_BYTES, MAX_DRAFT_TOKENS, Draft, DraftTokens, HiddenStates
from headrace.transfer.protocol import draft_frame
from headrace.transfer.protocol.checksum import of_ticket

PROBS = st.floats(0, 1, width=32)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    pairs = draw(st.lists(st.tuples(st.integers(0, 2**31 - 1), PROBS), max_size=MAX_DRAFT_TOKENS))
    tokens = DraftTokens(tuple(token for token, _ in pairs), tuple(prob for _, prob in pairs)) if pairs else None
    dtype, size = draw(st.sampled_from(list(DTYPE_BYTES))), draw(st.integers(1, 40))
    data = draw(st.binary(min_size=size * DTYPE_BYTES[dtype], max_size=size * DTYPE_BYTES[dtype]))
    state = HiddenStates(draw(st.integers(0, 2**31 - 1)), size, dtype, data)
    return Draft(draw(st.sampled_from([None, state])), tokens)


@given(st.text(min_size=1, max_size=256).filter(str.isprintable), st.integers(0, 2**63 - 1), drafts())
def test_round_trip(ticket: str, generation: int, draft: Draft) -> None:
    data = draft_frame.encode(ticket, generation, draft)
    assert draft_frame.decode(data, ticket, generation) == draft
    for other, number in ((ticket + "x", generation), (ticket, generation + 1)):
        with pytest.raises(ValueError, match="another ticket"):
            draft_frame.decode(data, other, number)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_a_value_error(data: bytes) -> None:
    head = struct.pack("<HBxHxxQQ", 1, 1, 0, of_ticket("t"), 1)
    for each in (data, head + data):
        try:
            draft = draft_frame.decode(each, "t", 1)
        except ValueError:
            continue
        assert draft_frame.encode("t", 1, draft) == each


STATE = HiddenStates(9, 2, "float16", b"abcd")
GOOD = draft_frame.encode("t", 1, Draft(STATE, DraftTokens((5, 6), (0.5, 0.25))))


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (0, "<H", 2, "version 2, expected 1"),
        (2, "<B", 4, "dtype 4, expected < 4"),
        (2, "<B", 0, "expected 48"),
        (2, "<B", 1, "expected 56"),
        (4, "<H", 1, "expected 44"),
        (4, "<H", 65, "65 tokens"),
        (28, "<I", 1, "expected 50"),
        (28, "<I", 0xFFFFFFFF, "4294967295 elements"),
        (32, "<i", -1, "the token -1"),
        (40, "<f", float("nan"), "a probability outside 0 to 1"),
        (40, "<f", -0.5, "a probability outside 0 to 1"),
        (40, "<f", 1.5, "a probability outside 0 to 1"),
    ],
)
def test_impossible_values_are_refused_saying_which(at: int, form: str, value: float, said: str) -> None:
    data = bytearray(GOOD)
    struct.pack_into(form, data, at, value)
    with pytest.raises(ValueError, match=said):
        draft_frame.decode(bytes(data), "t", 1)


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (Draft(None, DraftTokens(tuple(range(65)), (0.0,) * 65)), "up to 64 tokens, not 65"),
        (Draft(None, DraftTokens((1,), ())), "up to 64 tokens"),
        (Draft(HiddenStates(0, 1, "float16", b"abcd")), "one hidden state, not 2"),
        (Draft(HiddenStates(0, 1 << 19, "float16", bytes(1 << 20))), "up to 1048576 bytes"),
    ],
)
def test_what_does_not_fit_is_an_error(draft: Draft, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        draft_frame.encode("t", 1, draft)
