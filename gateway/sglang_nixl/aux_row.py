"""Metadata row of SGLang: what a decode engine has to know of the first token. Pure.

An engine has one buffer for each entry, with a row for each request; which optional ones it has follows from their
number, since those of them that could be confused come with models that are not served. All rows are at least 64 bytes,
and those of a buffer lie one after the other, so no length needs to be told. Source: MetadataBuffers of SGLang 0.5.23,
sglang/srt/disaggregation/utils.py.

    output_ids, cached_tokens, token logprob, its id, top logprobs, their ids,
    [length of the sampling mask, its ids, its logprobs], draft probabilities, draft ids, hidden state, room, [checksum]

What only speculative decoding reads is not written. The sampling mask has the length 0, and a checksum is left at 0,
which means that there is none. A room of 0 says that the row has not come yet.
"""

import struct

import msgspec

from headrace.core.types.requests.request import FirstToken, TokenLogprob

SMALL, LARGE = 64, 512  # bytes of a row: 16 words, 128 words
TOP = LARGE // 4  # most alternatives
MASK_LENGTH = 6  # buffer, where there is one
ROOM_BUFFER = {10: 9, 11: 9, 13: 12, 14: 12}
"""The buffer of the room, by the number of buffers: without options, with a checksum, a sampling mask, both."""
ROW_BYTES = 6 * SMALL + 2 * LARGE


class AuxPart(msgspec.Struct, frozen=True):
    """Bytes of one buffer's row."""

    buffer: int
    start: int
    """Where they begin in the bytes of the whole row."""
    length: int
    """Also the length of a row of the buffer."""


def check_buffers(count: int) -> None:
    """Raises ValueError for an engine with so many metadata buffers."""
    if count not in ROOM_BUFFER:
        served = ", ".join(str(number) for number in ROOM_BUFFER)
        raise ValueError(f"{count} metadata buffers at the decode engine; served are engines with {served}")


def aux_parts(count: int) -> tuple[AuxPart, ...]:
    """The parts of aux_row() for an engine with so many metadata buffers."""
    buffers = [(0, SMALL), (1, SMALL), (2, SMALL), (3, SMALL), (4, LARGE), (5, LARGE), (ROOM_BUFFER[count], SMALL)]
    if ROOM_BUFFER[count] > 9:
        buffers.append((MASK_LENGTH, SMALL))
    parts, start = [], 0
    for buffer, length in buffers:
        parts.append(AuxPart(buffer, start, length))
        start += length
    return tuple(parts)


def aux_row(first: FirstToken, room: int) -> bytes:
    """ROW_BYTES of the first token: the parts of every engine, then the empty sampling mask."""
    token = first.logprob or TokenLogprob(0, 0.0)
    top_ids, top_logprobs = token.top_ids[:TOP], token.top_logprobs[:TOP]
    rows = (
        (struct.pack("<i", first.token), SMALL),
        (struct.pack("<4i", *_cached(first)), SMALL),
        (struct.pack("<f", token.logprob), SMALL),
        (struct.pack("<i", token.token), SMALL),
        (struct.pack(f"<{len(top_logprobs)}f", *top_logprobs), LARGE),
        (struct.pack(f"<{len(top_ids)}i", *top_ids), LARGE),
        (struct.pack("<Q", room), SMALL),
        (b"", SMALL),
    )
    return b"".join(row.ljust(length, b"\0") for row, length in rows)


def _cached(first: FirstToken) -> tuple[int, int, int, int]:
    """Cached tokens: all, and those on the device, in host memory, in storage."""
    loaded = first.from_tiers
    return first.cached_tokens, first.cached_tokens - loaded.total, loaded.host, loaded.disk + loaded.library
