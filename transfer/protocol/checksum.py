"""XXH3 checksums (64 bits) of chunk payloads, and hashes of ticket names."""

from collections.abc import Iterable
from typing import Any

import xxhash

XXH3_64 = "xxh3_64"
NONE = "none"
Digest = xxhash.xxh3_64


def kinds(required: bool) -> tuple[str, ...]:
    """Checksum kinds that a side accepts, best first. One is used unless both sides have switched it off."""
    return (XXH3_64,) if required else (NONE, XXH3_64)


def of_frames(frames: Iterable[Any]) -> int:
    """xxh3_64 of the concatenated buffers (bytes, memoryview or C-contiguous arrays)."""
    digest = xxhash.xxh3_64()
    for frame in frames:
        digest.update(frame)
    return digest.intdigest()


def of_ticket(ticket: str) -> int:
    """xxh3_64 of the ticket's UTF-8 bytes, as the metadata row carries it."""
    return xxhash.xxh3_64_intdigest(ticket.encode())
