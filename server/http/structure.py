"""How many objects a JSON body would make, counted in its bytes before it is decoded. Pure.

Decoding 16 MiB of empty lists takes seconds and gigabytes, and no other request is served meanwhile; msgspec looks at
limits in the types only afterwards. A text or token ids of that size decode in milliseconds.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

SLICE = 1 << 14  # bytes looked at in one step; other threads get their turn between two of them
_STEP = 1 << 16  # bytes that numpy compares in one step, without the GIL; they stay in the cache
MAX_DEPTH = 128  # levels of lists and objects: what decodes or walks them may take a few Python frames for each
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_LEVELS = np.zeros(256, np.int8)  # by byte: what it adds to the depth
_LEVELS[list(b"[{")] = 1
_LEVELS[list(b"]}")] = -1


class Limit(NamedTuple):
    """A limit on the number of bytes of some kind outside of strings, or of strings: a quote stands for each."""

    what: str
    """What these bytes stand for, in the plural."""

    marks: tuple[bytes, ...]
    most: int
    inside: bool = False
    """The bytes stand for something wherever they are, such as the backslashes of escapes."""


def limits(max_body_bytes: int) -> tuple[Limit, ...]:
    """For a server that takes bodies of this size. A token id with its comma takes about six bytes."""
    containers = max(1 << 12, max_body_bytes >> 10)
    return (
        Limit("lists and objects", (b"[", b"{"), containers),
        Limit("fields", (b":",), 4 * containers),
        Limit("values", (b",",), max(1 << 16, max_body_bytes // 24)),
        Limit("texts", (b'"',), max(1 << 14, max_body_bytes >> 7)),  # a text takes as long as ten numbers
        Limit("escaped characters", (b"\\",), max(1 << 16, max_body_bytes >> 4), inside=True),
    )


def excess(body: bytes | bytearray, limits: tuple[Limit, ...], slice_bytes: int = SLICE) -> Limit | None:
    """A limit that the body exceeds. Exact for JSON, and for other bodies up to where they are none any more, which is
    where decoding ends, too."""
    doubtful = suspected(body, limits)
    found = next((limit for limit in doubtful if limit.inside), None)
    if found is None and doubtful:
        return _excess_of(outside_strings(body, slice_bytes), doubtful)
    return found


def nests_deeper(body: bytes | bytearray, most: int, slice_bytes: int = SLICE) -> bool:
    """Whether lists and objects nest more than so many levels deep."""
    if body.count(b"[") + body.count(b"{") <= most:
        return False
    level = 0
    for part in outside_strings(body, slice_bytes):
        levels = level + np.cumsum(_LEVELS[np.frombuffer(part, np.uint8)], dtype=np.int64)
        if levels.max(initial=0) > most:
            return True
        level = int(levels[-1]) if len(levels) else level
    return False


def suspected(body: bytes | bytearray, limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """The limits that bytes of the whole body exceed. Strings count here as everything else, which is quickly done."""
    counts = _counts(body, [mark for limit in limits for mark in limit.marks])
    return tuple(limit for limit in limits if sum(counts[mark] for mark in limit.marks) > limit.most)


def _counts(body: bytes | bytearray, marks: Iterable[bytes]) -> dict[bytes, int]:
    """How often each of these bytes is there."""
    counts = dict.fromkeys(marks, 0)
    everything = np.frombuffer(body, np.uint8)
    for at in range(0, len(body), _STEP):
        step = everything[at : at + _STEP]
        for mark in counts:
            counts[mark] += int(np.count_nonzero(step == mark[0]))
    return counts


def _excess_of(parts: Iterable[bytes], limits: tuple[Limit, ...]) -> Limit | None:
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
