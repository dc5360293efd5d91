"""The header of KV files: what is written is read again, and nothing else is."""

import random
import struct
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.kv.geometry import Component
from headrace.core.types.kv.kv_files import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    START_BYTES,
    KvFileError,
    KvFileHeader,
    file_bytes,
    pack_start,
    parse_header,
    parse_start,
)
from headrace.core.types.packed import pack
from tests.fuzz.mutations import CLAIMS, NESTED, NO_TEXT, Mutator
from tests.kv_files import PAGE_SIZE, kv_file

HEADER, PAGES = kv_file(range(5 * PAGE_SIZE))
WRITTEN = pack_start(HEADER)


def read(data: bytes) -> KvFileHeader:
    start = parse_start(data)
    return parse_header(data[START_BYTES : START_BYTES + start.header_bytes], start)


def sealed(body: bytes, version: int = 1) -> bytes:
    """A file's beginning whose digest is right, whatever the header is."""
    return struct.pack("<8sII32s", b"HRKVFILE", version, len(body), sha256(body).digest()) + body


def changed(**fields: Any) -> bytes:
    return sealed(msgspec.msgpack.encode(msgspec.structs.replace(HEADER, **fields)))


def test_what_is_written_is_read_again() -> None:
    assert read(WRITTEN) == HEADER
    assert len(WRITTEN) % ALIGNMENT == 0
    start = parse_start(WRITTEN)
    assert start.pages_at == len(WRITTEN)
    assert file_bytes(HEADER, start) == len(WRITTEN) + sum(map(len, PAGES))


@given(st.integers(0, len(WRITTEN) * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_every_flipped_bit_of_the_header_is_found(bit: int) -> None:
    data = bytearray(WRITTEN)
    data[bit // 8] ^= 1 << bit % 8
    end = START_BYTES + parse_start(WRITTEN).header_bytes
    if bit // 8 >= end:
        assert read(bytes(data)) == HEADER  # of the zeros that fill up to the first page
    else:
        with pytest.raises(KvFileError):
            read(bytes(data))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ends after 0 bytes"),
        (WRITTEN[:40], "ends after 40 bytes"),
        (WRITTEN[: START_BYTES + 9], "ends within its header"),
        (b"GGUF" + WRITTEN[4:], "it is no KV file"),
        (sealed(b"", version=2), "version 2 of the format; this release reads version 1"),
        (struct.pack("<8sII32s", b"HRKVFILE", 1, 0xFFFFFFFF, bytes(32)), f"the limit is {MAX_HEADER_BYTES}"),
        (sealed(NESTED), "cannot be read"),
        (sealed(NO_TEXT), "cannot be read"),
        (changed(tokens=pack(range(1, 1 + 5 * PAGE_SIZE))), "its tokens are others"),
        (changed(tokens=HEADER.tokens[4:]), "lists are of other lengths"),
        (changed(tokens=HEADER.tokens + b"\0"), "its tokens are others"),
        (changed(digests=HEADER.digests[:-1] + b"\0"), "its tokens are others"),
        (changed(digests=HEADER.digests[32:] + HEADER.digests[:32]), "its tokens are others"),
        (changed(checksums=HEADER.checksums[:-1]), "lists are of other lengths"),
        (changed(checksums=b"", tokens=b"", digests=b""), "it has 0 pages"),
        (changed(page_size=2 * PAGE_SIZE), "lists are of other lengths"),
        (changed(page_size=0), "cannot be read"),
        (changed(salt="mine"), "cannot be read"),
        (changed(tensors=()), "cannot be read"),
        (changed(tensors=(Component("kv", "float8", 4, 2, 8),)), "which no page of a model is"),
        (changed(tensors=(Component("kv", "float32", -4, 2, 8),)), "which no page of a model is"),
        (changed(tensors=(Component("kv", "float32", 1 << 19, 1 << 19, 8),)), "the limit is"),
        (changed(tensors=(Component("kv", "float32", 4, 2, 8, layer_start=1),)), "which no page of a model is"),
    ],
)
def test_what_is_no_header_is_told(data: bytes, words: str) -> None:
    with pytest.raises(KvFileError, match=words):
        read(data)


def test_a_header_that_could_not_be_read_again_is_not_written() -> None:
    with pytest.raises(KvFileError, match="its tokens are others"):
        pack_start(msgspec.structs.replace(HEADER, tokens=pack(range(7, 7 + 5 * PAGE_SIZE))))


@pytest.mark.parametrize("examples", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_spoilt_headers_are_refused_or_mean_what_they_say(examples: int) -> None:
    """Also those whose digest was made to fit: what is accepted describes itself without a contradiction."""
    body = msgspec.msgpack.encode(HEADER)
    accepted = 0
    for seed in range(examples):
        mutator = Mutator(seed)
        data = mutator.spoil(body) if seed % 10 else random.Random(seed).choice(CLAIMS) + mutator.rubbish()
        try:
            header = read(sealed(data))
        except KvFileError:
            continue
        accepted += 1
        assert len(header.tokens) == 4 * header.pages * header.page_size
        assert 0 < header.page_bytes <= 1 << 30
        assert len(header.digests) == len(header.checksums) == 32 * header.pages
    assert accepted < examples / 2
