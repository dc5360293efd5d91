"""The ways in which KV moves between two servers, and how a pool is described to those who write into it."""

from typing import Annotated

import msgspec
from msgspec import Meta

from core.geometry import Geometry

ZMQ = "zmq"  # in frames of the data connection
SHM = "shm"  # the sending stage writes into the peer's pool, which both have mapped
NIXL = "nixl"  # the sending stage writes into the peer's pool over the network, by NIXL
FAKE = "fake"  # nowhere: for benchmarks of everything else
BACKENDS = (SHM, NIXL, ZMQ, FAKE)

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
HostToken = Annotated[str, Meta(min_length=1, max_length=128)]
Version = Annotated[str, Meta(min_length=1, max_length=64)]
AgentMetadata = Annotated[bytes, Meta(min_length=1, max_length=12 << 10)]
FileName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z_][0-9A-Za-z._-]{0,127}\Z")]
Strides = tuple[Size, Size, Size, Size, Size]


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A pool in a file of /dev/shm that others on the host may map.

    host: equal for all processes that see the same /dev/shm. name: of the file; bytes: its size. offset: where the
    first page begins; strides: bytes from one page, layer, K or V, head and slot to the next. A slot is contiguous.
    """

    host: HostToken
    name: FileName
    bytes: Size
    pages: Size
    strides: Strides
    offset: Size = 0


class NixlMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A pool that NIXL of this version can write into. strides: as in SharedMemory."""

    version: Version
    pages: Size
    strides: Strides


class NixlAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What gives a stage the right to write into a NixlMemory during one session. metadata: of the NIXL agent that the
    pool is registered with; address: where the first page begins."""

    metadata: AgentMetadata
    address: Size


class PoolMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How others can write into the pool of one stage; None where they cannot."""

    shm: SharedMemory | None = None
    nixl: NixlMemory | None = None


def writes_directly(backend: str) -> bool:
    """Whether the sending side writes into the peer's pages itself, so that the peer cannot refuse a write."""
    return backend in (SHM, NIXL)


def page_strides(geometry: Geometry) -> Strides:
    """Of a pool in C order."""
    slot = geometry.head_dim * geometry.item_bytes
    head = geometry.page_size * slot
    kind = geometry.kv_heads * head
    return geometry.layers * 2 * kind, 2 * kind, kind, head, slot
