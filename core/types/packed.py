"""Lists of int32 (token ids, page ids) as bytes of messages: little-endian, without a length."""

import hashlib
import sys
from array import array
from collections.abc import Iterable

ITEM_BYTES = 4


def pack(values: Iterable[int]) -> bytes:
    """Returns the values as little-endian int32 bytes. Raises OverflowError for a value outside int32."""
    packed = array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> "array[int]":
    """Returns the packed values. Raises ValueError when the length is no multiple of four bytes."""
    if len(data) % ITEM_BYTES:
        raise ValueError(f"a packed int32 list has {len(data)} bytes, which is no multiple of {ITEM_BYTES}")
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def prompt_hash(prompt: bytes, images: str = "") -> str:
    """SHA-256 of a prompt's packed token ids and the digest of its images ("" for none), in hexadecimal; both sides of
    a handoff compare it."""
    return hashlib.sha256(prompt + images.encode()).hexdigest()


def packed_length(data: bytes | bytearray) -> int:
    """Number of values in packed bytes."""
    return len(data) // ITEM_BYTES
