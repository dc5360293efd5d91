"""The ways in which KV moves between two servers, and how a pool is described to those who write into it."""

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, field

from headrace.core.types.geometry import MAX_COMPONENTS, Word

Backend = Literal["shm", "nixl", "zmq", "fake"]
ZMQ: Final = "zmq"  # payload in ZMQ frames of the data connection
SHM: Final = "shm"  # the sending stage writes into the peer's pool, which both have mapped
NIXL: Final = "nixl"  # the sending stage writes into the peer's pool over the network, through NIXL
FAKE: Final = "fake"  # moves nothing; for benchmarks of everything else
BACKENDS: tuple[Backend, ...] = get_args(Backend)

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
HostToken = Annotated[str, Meta(min_length=1, max_length=128)]
Version = Annotated[str, Meta(min_length=1, max_length=64)]
AgentMetadata = Annotated[bytes, Meta(min_length=1, max_length=12 << 10)]
FileName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z_][0-9A-Za-z._-]{0,127}\Z")]
Strides = tuple[Size, Size, Size, Size, Size]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a component's part of a pool begins, and bytes from one page, layer, plane, head and slot to the next."""

    name: Word
    offset: Size
    strides: Strides


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the pages of a pool lie in a memory of so many bytes, for those who write into it.

    offset: where keys and values of the first page begin; strides: bytes from one page, layer, K or V, head and slot
    to the next. components: the same of each component. A slot of a head is contiguous; nothing else has to be, and a
    page may be scattered.
    """

    bytes: Size
    pages: Size
    strides: Strides
    offset: Size = field(default_factory=int)  # a factory has msgspec write it even when it is 0
    components: Annotated[tuple[Placement, ...], Meta(max_length=MAX_COMPONENTS)] = ()


class SharedMemory(PoolLayout, frozen=True):
    """A pool in a file of /dev/shm that others on the host may map: the memory of its layout. host: equal for all
    processes that see the same /dev/shm. name: of the file."""

    host: HostToken
    name: FileName


class NixlMemory(PoolLayout, frozen=True):
    """A pool that NIXL of this version can write into: the memory of its layout, which begins at an address that
    NixlAccess tells."""

    version: Version


class NixlAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What gives a stage the right to write into a NixlMemory during one session. metadata: of the NIXL agent that the
    pool is registered with; address: where its memory begins."""

    metadata: AgentMetadata
    address: Size


class PoolMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How others can write into the pool of one stage; None where they cannot."""

    shm: SharedMemory | None = None
    nixl: NixlMemory | None = None


def writes_directly(backend: str) -> bool:
    """Whether the sending side writes into the peer's pages itself, so that the peer cannot refuse a write."""
    return backend in (SHM, NIXL)
