"""Format of a KV page on disk: a header of 512 bytes that describes itself, then the page's bytes.

    offset  size
         0    16  magic, version of the format, size of the header
        16   124  origin: what the page is a page of, and which part of it (Origin)
       140   136  page: digests, turn, slot, segment, offset in it, length and XXH3 of the page's bytes
       276   228  zeros
       504     8  XXH3 of the 504 bytes before

All numbers are little-endian. A record names its own place, so that a misplaced one is found. Salts are hashed. Pure.
"""

import struct
from typing import Literal, NamedTuple

import msgspec
import xxhash

from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.kv.kv_tiers import PageHeader

MAGIC = b"HRKVPAGE"
VERSION = 1
HEADER_BYTES = 512
DIGEST_BYTES = 32
Defect = Literal["damaged", "version", "foreign"]

_START = struct.Struct("<8sHHI")
_ORIGIN = struct.Struct("<64s16s9IQ")
_PAGE = struct.Struct("<32s32s32sIIQQQQ")
_CHECKSUM = struct.Struct("<Q")
_PAGE_AT = _START.size + _ORIGIN.size
_CHECKED = HEADER_BYTES - _CHECKSUM.size
_PADDING = bytes(_CHECKED - _PAGE_AT - _PAGE.size)
_MAX_TURN = (1 << 32) - 1


class Origin(msgspec.Struct, frozen=True):
    """What the pages of a store are pages of; others are foreign to it."""

    fingerprint: str
    """Of the model, in at most 64 ASCII characters."""
    geometry: Geometry
    """Of the stage's pool."""
    stage: int = 0
    """Pipeline rank."""
    shard: int = 0
    """Rank within the stage's tensor-parallel group."""
    shards: int = 1
    """Size of that group."""

    def pack(self) -> bytes:
        """The origin as headers have it."""
        shape = self.geometry
        return _ORIGIN.pack(
            self.fingerprint.encode("ascii"),
            shape.dtype.encode("ascii"),
            shape.page_size,
            shape.layers,
            shape.layer_start,
            shape.kv_heads,
            shape.head_start,
            shape.head_dim,
            self.stage,
            self.shard,
            self.shards,
            xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(shape)),  # covers the components
        )


class Record(NamedTuple):
    """A page on disk, as its header describes it."""

    page: PageHeader
    slot: int
    segment: int
    """Number of the file."""
    offset: int
    """Of the header in the file."""
    length: int
    """Bytes of the page, after the header."""
    checksum: int
    """XXH3, 64 bits, of the page's bytes."""


class Foreign(NamedTuple):
    """An intact header of a page of another model, geometry or stage."""

    length: int
    """Bytes after the header."""


def pack_header(origin: bytes, record: Record) -> bytes:
    """The 512 bytes before a page. origin: packed."""
    page = record.page
    body = b"".join(
        (
            _START.pack(MAGIC, VERSION, HEADER_BYTES, 0),
            origin,
            _PAGE.pack(page.digest, page.parent, page.salt, min(page.turn, _MAX_TURN), *record[1:]),
            _PADDING,
        )
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse_header(data: bytes, origin: bytes) -> Record | Foreign | Literal["damaged", "version"]:
    """Parse the 512 bytes before a page.

    origin: packed; pages of another one are Foreign. damaged: not a header, or a changed one. version: the header of
    another version of this format.
    """
    magic, version, *_ = _START.unpack_from(data)
    if magic != MAGIC:
        return "damaged"
    if _CHECKSUM.unpack_from(data, _CHECKED)[0] != xxhash.xxh3_64_intdigest(data[:_CHECKED]):
        return "damaged"
    if version != VERSION:
        return "version"
    digest, parent, salt, turn, *place = _PAGE.unpack_from(data, _PAGE_AT)
    record = Record(PageHeader(digest, parent, salt, turn), *place)
    return record if data[_START.size : _PAGE_AT] == origin else Foreign(record.length)
