"""Format of a KV file: the KV cache of the pages of one prompt, described by a header. docs/kv-files.md has the table.

    offset  size
         0     8  magic
         8     4  version of the format
        12     4  size of the header
        16    32  SHA-256 of the header: the file's digest
        48     …  header (KvFileHeader, msgpack)
         …     …  zeros, to a multiple of 4096
         …     …  pages, back to back

A page has its tensors in the order of the header, each [layers, planes, kv_heads, page_size, head_dim] of the whole
model. All numbers are little-endian. The header has a SHA-256 of each page, so its own covers every byte that counts.
Pure.
"""

import struct
from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.core.types.kv.geometry import ITEM_BYTES, Component, ceil_div
from headrace.core.types.kv.kv_tiers import LIBRARY_PAGES
from headrace.core.types.kv.page_digests import DIGEST_BYTES, text_digests
from headrace.core.types.packed import packed_length

MAGIC = b"HRKVFILE"
VERSION = 1
SUFFIX = ".kv"
INDEX = "index.json"
"""Name of the list of the KV files in a folder, which stores without directory listings need."""

ALIGNMENT = 4096
MAX_HEADER_BYTES = 16 << 20
MAX_PAGE_BYTES = 1 << 30
MAX_TENSORS = 16
_START = struct.Struct(f"<{len(MAGIC)}sII{DIGEST_BYTES}s")
START_BYTES = _START.size
_BOUND = 1 << 20  # of each size of a tensor

Text = Annotated[str, Meta(max_length=1024)]


class KvFileError(Exception):
    """It is no KV file, or a damaged one; the message says what is wrong with it."""


class KvComputation(msgspec.Struct, frozen=True):
    """What the bits of computed KV depend on beside the model and the prompt."""

    device: Text
    """Kind of the CPU (its maker, and the instruction sets that are used), or the GPU's name."""
    dtype: Text
    """Of products and sums."""
    quantize: Text
    torch: Text
    """Version of torch."""
    headrace: Text
    """Version of Headrace."""


class KvFileHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a KV file holds."""

    model: Text
    """As it was named when the file was made; the fingerprint counts."""
    fingerprint: Text
    page_size: Annotated[int, Meta(ge=1, le=4096)]
    """Tokens per page."""
    tensors: Annotated[tuple[Component, ...], Meta(min_length=1, max_length=MAX_TENSORS)]
    """Of a page, over all layers and heads of the model."""
    salt: Literal["shared"] = "shared"
    """Who may use it: all requests without a cache salt of their own."""
    tokens: bytes
    """Packed ids, a whole number of pages."""
    digests: bytes
    """Digest of each page (core/types/kv/page_digests.py), with the salt "", one behind the other."""
    checksums: bytes
    """SHA-256 of each page's bytes, one behind the other."""
    computation: KvComputation

    @property
    def pages(self) -> int:
        """Number of pages."""
        return len(self.checksums) // DIGEST_BYTES

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(tensor.token_bytes for tensor in self.tensors) * self.page_size

    def checksum(self, page: int) -> bytes:
        """SHA-256 of a page."""
        return self.checksums[page * DIGEST_BYTES : (page + 1) * DIGEST_BYTES]


class KvFileStart(msgspec.Struct, frozen=True):
    """The first bytes of a KV file."""

    header_bytes: int
    digest: bytes

    @property
    def pages_at(self) -> int:
        """Offset of the first page."""
        return ceil_div(START_BYTES + self.header_bytes, ALIGNMENT) * ALIGNMENT


class KvFile(msgspec.Struct, frozen=True):
    """A KV file that is to be used."""

    location: str
    """Path of a file, or its URL."""
    digest: bytes
    """SHA-256 of its header."""
    tokens: bytes
    """Packed token ids, a whole number of pages."""


class IndexEntry(msgspec.Struct, frozen=True):
    """A KV file beside an index."""

    name: Text
    size: Annotated[int, Meta(ge=0)]
    """In bytes."""
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its header, in hexadecimal."""


class KvFileIndex(msgspec.Struct, frozen=True):
    """The list of the KV files of a store, as JSON; `headrace bake --index` writes it."""

    files: Annotated[tuple[IndexEntry, ...], Meta(max_length=10_000)]


def pack_start(header: KvFileHeader) -> bytes:
    """All bytes before the first page. Raises KvFileError for a header that could not be read again."""
    body = msgspec.msgpack.encode(header)
    start = KvFileStart(len(body), sha256(body).digest())
    data = _START.pack(MAGIC, VERSION, len(body), start.digest) + body
    parse_header(body, parse_start(data))
    return data.ljust(start.pages_at, b"\0")


def parse_start(data: bytes) -> KvFileStart:
    """Parse the first START_BYTES of a file. Raises KvFileError."""
    if len(data) < START_BYTES:
        raise KvFileError(f"it ends after {len(data)} bytes, within its first {START_BYTES}")
    magic, version, size, digest = _START.unpack_from(data)
    if magic != MAGIC:
        raise KvFileError(f"it is no KV file: it begins with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise KvFileError(f"version {version} of the format; this release reads version {VERSION}")
    if size > MAX_HEADER_BYTES:
        raise KvFileError(f"its header has {size} bytes; the limit is {MAX_HEADER_BYTES}")
    return KvFileStart(size, digest)


def parse_header(body: bytes, start: KvFileStart) -> KvFileHeader:
    """Parse the header, and compare what it says with itself. Raises KvFileError."""
    if len(body) != start.header_bytes:
        raise KvFileError(f"it ends within its header of {start.header_bytes} bytes")
    if sha256(body).digest() != start.digest:
        raise KvFileError("its header was changed: its SHA-256 is another one")
    try:
        header = msgspec.msgpack.decode(body, type=KvFileHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KvFileError(f"its header cannot be read: {error}") from None
    for tensor in header.tensors:
        _check_tensor(tensor)
    if not 1 <= header.page_bytes <= MAX_PAGE_BYTES:
        raise KvFileError(f"its pages have {header.page_bytes} bytes; the limit is {MAX_PAGE_BYTES}")
    pages = header.pages
    if not 1 <= pages <= LIBRARY_PAGES:
        raise KvFileError(f"it has {pages} pages, and may have 1 to {LIBRARY_PAGES}")
    if len(header.checksums) != pages * DIGEST_BYTES or packed_length(header.tokens) != pages * header.page_size:
        raise KvFileError(f"its lists are of other lengths than {pages} pages of {header.page_size} tokens have")
    if len(header.tokens) % 4 or b"".join(text_digests(header.tokens, header.page_size)) != header.digests:
        raise KvFileError("its tokens are others than those that the digests of its pages are of")
    return header


def file_bytes(header: KvFileHeader, start: KvFileStart) -> int:
    """Size of the whole file."""
    return start.pages_at + header.pages * header.page_bytes


def _check_tensor(tensor: Component) -> None:
    sizes = (tensor.layers, tensor.planes, tensor.kv_heads, tensor.head_dim)
    whole = not (tensor.layer_start or tensor.head_start or tensor.per_request or tensor.window)
    if tensor.dtype not in ITEM_BYTES or not whole or not all(1 <= size <= _BOUND for size in sizes):
        raise KvFileError(f"its tensor {tensor.name} is {tensor.dtype} {list(sizes)}, which no page of a model is")
