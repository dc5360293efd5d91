"""Content codings of bodies: what is decoded, and what a coded body may cost."""

import gzip
import itertools
import json
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from headrace.core.types.errors import HeadraceError
from headrace.server.http.body import PIECE, BodyBudget, body_decoder, read_body
from headrace.server.http.structure import MAX_DEPTH, nests_deeper
from tests.server.fakes import in_loop

LIMIT = 1 << 20
CODECS = {"gzip": gzip.compress, "deflate": zlib.compress}


def decoded(coding: str, coded: bytes, cuts: list[int]) -> bytes:
    decoder = body_decoder([coding])
    assert decoder is not None
    places = sorted({0, len(coded), *(cut % (len(coded) + 1) for cut in cuts)})
    pieces = [piece for start, end in itertools.pairwise(places) for piece in decoder.pieces(coded[start:end])]
    decoder.finish()
    assert all(len(piece) <= PIECE for piece in pieces)
    return b"".join(pieces)


@given(
    coding=st.sampled_from(sorted(CODECS)),
    body=st.binary(max_size=100) | st.integers(0, 5 * PIECE).map(bytes),
    cuts=st.lists(st.integers(0, 1 << 30), max_size=5),
)
def test_a_coded_body_is_decoded_however_it_comes(coding: str, body: bytes, cuts: list[int]) -> None:
    assert decoded(coding, CODECS[coding](body), cuts) == body


@pytest.mark.parametrize("size", [PIECE - 1, PIECE, PIECE + 1, 4 * PIECE])
def test_a_body_of_whole_pieces_is_whole(size: int) -> None:
    assert decoded("gzip", gzip.compress(bytes(size)), []) == bytes(size)


def test_codings_are_named_as_they_are_sent() -> None:
    assert body_decoder([]) is None
    assert body_decoder(["identity", ""]) is None
    for values, said in ((["zstd"], "zstd"), (["gzip", "br"], "gzip, br"), (["gzip, gzip"], "gzip, gzip")):
        with pytest.raises(HeadraceError) as caught:
            body_decoder(values)
        assert caught.value.info.status == 415
        assert repr(said) in caught.value.info.message


async def read(coding: str, coded: bytes, budget: BodyBudget, part: int = 1 << 16) -> bytes:
    """The body that a route gets."""
    parts = [coded[at : at + part] for at in range(0, len(coded), part)]

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    headers = [(b"content-encoding", coding.encode()), (b"content-length", b"%d" % len(coded))]
    return bytes(await read_body(Request({"type": "http", "headers": headers}, receive), LIMIT, budget))


@in_loop
async def test_a_bomb_costs_no_more_than_the_largest_body() -> None:
    bomb = gzip.compress(bytes(1 << 28))
    budget = BodyBudget(LIMIT)
    tracemalloc.start()
    try:
        with pytest.raises(HeadraceError) as caught:
            await read("gzip", bomb, budget)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.info.status == 413
    assert peak < 4 * LIMIT
    assert {sample.name: sample.value for sample in budget.statistics()}["http_body_bytes"] == 0


@in_loop
async def test_what_is_decoded_counts_against_the_memory_for_all_bodies() -> None:
    body = b'"%s"' % bytes(48 * (LIMIT >> 6)).replace(b"\0", b"x")
    budget = BodyBudget(LIMIT)
    assert await read("deflate", zlib.compress(body), budget) == body
    budget.take(64 << 20)
    with pytest.raises(HeadraceError) as caught:
        await read("deflate", zlib.compress(body), budget, part=100)
    assert caught.value.info.code == "too_many_bodies"


@given(
    st.recursive(st.sampled_from(["1", '"[["', '"\\\\[{"', '"]}"']), lambda inner: st.lists(inner, max_size=3).map(
        lambda items: "[" + ",".join(items) + "]") | inner.map(lambda item: '{"a[":' + item + "}"), max_leaves=20),
    st.integers(0, 4),
    st.sampled_from([1, 3, 1 << 14]),
)  # fmt: skip
def test_nesting_is_counted_exactly(text: str, most: int, slice_bytes: int) -> None:
    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    body = text.encode()
    assert nests_deeper(body, most, slice_bytes) == (depth(json.loads(body)) > most)


def test_nesting_is_not_the_number_of_lists() -> None:
    assert not nests_deeper(b"[" + b",".join([b"[]"] * 10_000) + b"]", MAX_DEPTH)
    assert not nests_deeper(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, MAX_DEPTH)
    assert nests_deeper(b"[" * (MAX_DEPTH + 1), MAX_DEPTH)
