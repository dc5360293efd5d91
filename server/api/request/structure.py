"""How many objects a JSON body would make, counted in its bytes before it is decoded. Pure.

Decoding 16 MiB of empty lists takes seconds and gigabytes, and no other request is served meanwhile; msgspec looks at
limits in the types only afterwards. A text or token ids of that size decode in milliseconds.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

SLICE = 1 << 14  # bytes looked at in one step; other threads get their turn between two of them
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


class Limit(NamedTuple):
    """A limit on the number of bytes of some kind outside of strings, or of strings: a quote stands for each."""

    what: str
    """What these bytes stand for, in the plural."""

    marks: tuple[bytes, ...]
    most: int


def limits(max_body_bytes: int) -> tuple[Limit, ...]:
    """For a server that takes bodies of this size. A token id with its comma takes about six bytes."""
    containers = max(1 << 12, max_body_bytes >> 10)
    return (
        Limit("lists and objects", (b"[", b"{"), containers),
        Limit("fields", (b":",), 4 * containers),
        Limit("values", (b",",), max(1 << 16, max_body_bytes // 24)),
        Limit("texts", (b'"',), max(1 << 14, max_body_bytes >> 7)),  # a text takes as long as ten numbers
    )


def suspected(body: bytes | bytearray, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """The limits that excess() has to look at, which takes longer: strings count here as everything else."""
    parts = [body[at : at + SLICE] for at in range(0, len(body), SLICE)]
    return tuple(limit for limit in limits if excess_of(parts, (limit,)))


def excess(body: bytes | bytearray, limits: tuple[Limit, ...], slice_bytes: int = SLICE) -> Limit | None:
    """A limit that the body exceeds. Exact for JSON, and for other bodies up to where they are none any more, which is
    where decoding ends, too."""
    return excess_of(outside_strings(body, slice_bytes), limits)


def excess_of(parts: Iterable[bytes | bytearray], limits: tuple[Limit, ...]) -> Limit | None:
    """The limit that is exceeded first."""
    counts = [0] * len(limits)
    for part in parts:
        for number, limit in enumerate(limits):
            counts[number] += sum(part.count(mark) for mark in limit.marks)
            if counts[number] > limit.most:
                return limit
    return None


def outside_strings(body: bytes | bytearray, slice_bytes: int = SLICE) -> Iterator[bytes]:
    """The body with a quote in the place of each string, in parts."""
    inside, half = False, b""
    for at in range(0, len(body), slice_bytes):
        part = _ESCAPE.sub(b"", half + body[at : at + slice_bytes])  # from here on every quote begins or ends a string
        half = b"\\" if part.endswith(b"\\") else b""
        pieces = part.split(b'"')
        yield b'"'.join(pieces[inside::2])
        inside ^= len(pieces) % 2 == 0
