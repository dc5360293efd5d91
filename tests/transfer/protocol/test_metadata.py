"""Metadata rows: what is put in comes out, and nothing else is accepted."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.requests.request import FirstToken, TokenLogprob
from headrace.transfer.protocol import metadata
from headrace.transfer.protocol.metadata import MetadataRows

TOKENS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)


@st.composite
def first_tokens(draw: st.DrawFn) -> FirstToken:
    token = draw(TOKENS)
    top = draw(st.lists(st.tuples(TOKENS, LOGPROBS), max_size=metadata.MAX_TOP))
    logprob = TokenLogprob(token, draw(LOGPROBS), tuple(i for i, _ in top), tuple(p for _, p in top))
    cached, prompt = sorted((draw(TOKENS), draw(TOKENS)))
    host = draw(st.integers(0, cached))
    return FirstToken(
        token=token,
        prompt_tokens=prompt,
        cached_tokens=cached,
        logprob=draw(st.sampled_from([None, logprob])),
        finish_reason=draw(st.sampled_from(metadata.FINISH_REASONS)),
        from_tiers=TierTokens(host, draw(st.integers(0, cached - host))),
        next_position=draw(st.integers(0, prompt)),
    )


@given(st.text(min_size=1, max_size=256).filter(str.isprintable), st.integers(0, 2**63 - 1), first_tokens())
def test_round_trip(ticket: str, generation: int, first: FirstToken) -> None:
    rows = MetadataRows(2)
    rows.set(1, metadata.encode(ticket, generation, first))
    row = rows.read(1)
    assert row.first == first
    assert row.belongs_to(ticket, generation)
    assert not row.belongs_to(ticket + "x", generation)
    assert not row.belongs_to(ticket, generation + 1)
    assert rows.is_clear(0)


def test_a_row_serves_one_request_at_a_time() -> None:
    rows = MetadataRows(1)
    data = metadata.encode("t", 1, FirstToken(token=1, prompt_tokens=2, cached_tokens=0))
    rows.set(0, data)
    with pytest.raises(ValueError, match="row 0 is in use"):
        rows.set(0, data)
    rows.clear(0)
    with pytest.raises(ValueError, match="version 0, expected 1"):
        rows.read(0)
    rows.set(0, data)


def test_more_alternatives_than_fit_are_an_error() -> None:
    logprob = TokenLogprob(1, -1.0, tuple(range(21)), (-1.0,) * 21)
    with pytest.raises(ValueError, match="up to 20 pairs of alternatives, not 21"):
        metadata.encode("t", 1, FirstToken(token=1, prompt_tokens=1, cached_tokens=0, logprob=logprob))


GOOD = TokenLogprob(7, -0.5, (7, 9), (-0.5, -1.5))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token": -1}, "negative token or count"),
        ({"prompt_tokens": -1}, "negative token or count"),
        ({"cached_tokens": -1}, "negative token or count"),
        ({"cached_tokens": 11}, "11 cached of 10 prompt tokens"),
        ({"from_tiers": TierTokens(host=-1)}, "negative token or count"),
        ({"from_tiers": TierTokens(disk=-1)}, "negative token or count"),
        ({"cached_tokens": 8, "from_tiers": TierTokens(5, 4)}, "9 tokens from tiers of 8 cached ones"),
        ({"next_position": -1}, "goes on at -1"),
        ({"next_position": 11}, "goes on at 11 behind 10 prompt tokens"),
        ({"logprob": TokenLogprob(7, math.nan)}, "not finite"),
        ({"logprob": TokenLogprob(7, math.inf)}, "not finite"),
        ({"logprob": replace(GOOD, top_logprobs=(-0.5, math.nan))}, "not finite"),
        ({"logprob": replace(GOOD, top_logprobs=(-0.5, -math.inf))}, "not finite"),
        ({"logprob": replace(GOOD, top_ids=(7, -9))}, "the token -9 among its alternatives"),
    ],
)
def test_values_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    good = FirstToken(token=7, prompt_tokens=10, cached_tokens=0, logprob=GOOD)
    assert metadata.decode(metadata.encode("t", 1, good)).first == good
    with pytest.raises(ValueError, match=said):
        metadata.decode(metadata.encode("t", 1, replace(good, **changes)))


def test_an_unknown_finish_reason_is_refused() -> None:
    data = bytearray(metadata.encode("t", 1, FirstToken(token=7, prompt_tokens=10, cached_tokens=0)))
    data[4] = 4
    with pytest.raises(ValueError, match="finish reason 4, expected < 4"):
        metadata.decode(bytes(data))


@given(st.binary(max_size=300) | st.binary(min_size=256, max_size=256))
def test_any_bytes_decode_or_raise_value_error(data: bytes) -> None:
    try:
        metadata.decode(data)
    except ValueError:
        return
    assert len(data) == metadata.ROW_BYTES


@given(st.binary(min_size=254, max_size=254))
def test_any_bytes_of_the_right_version_decode_or_raise_value_error(data: bytes) -> None:
    try:
        row = metadata.decode(b"\x01\x00" + data)
    except ValueError:
        return
    assert row.first.token >= 0
