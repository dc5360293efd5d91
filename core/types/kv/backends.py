"""Transfer backends, and the description of a KV pool that lets a peer write into it."""

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta, field

from headrace.core.types.kv.geometry import MAX_COMPONENTS, Word

Backend = Literal["cuda_ipc", "shm", "nixl", "zmq", "fake"]
ZMQ: Final = "zmq"  # payload in ZMQ frames of the data connection
CUDA_IPC: Final = (
    "cuda_ipc"  # the sending stage's GPU writes into the peer's pool, in the memory of a GPU of the same host
)
SHM: Final = "shm"  # the sending stage writes into the peer's pool, which both have mapped
NIXL: Final = "nixl"  # the sending stage writes into the peer's pool over the network, through NIXL
FAKE: Final = "fake"  # moves nothing; for benchmarks of everything else
BACKENDS: tuple[Backend, ...] = get_args(Backend)

Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
HostToken = Annotated[str, Meta(min_length=1, max_length=128)]
Version = Annotated[str, Meta(min_length=1, max_length=64)]
AgentMetadata = Annotated[bytes, Meta(min_length=1, max_length=12 << 10)]
Gpu = Annotated[str, Meta(min_length=1, max_length=64)]
FileName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z_][0-9A-Za-z._-]{0,127}\Z")]
Strides = tuple[Size, Size, Size, Size, Size]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a component lies in the memory of a pool."""

    name: Word
    """Name of the component."""
    offset: Size
    """Byte at which its first page begins."""
    strides: Strides
    """Bytes from one page, layer, plane, head and slot to the next."""


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where the pages of a pool lie in its memory.

    A slot of a head is contiguous; nothing else has to be, so a page may be scattered.
    """

    bytes: Size
    """Size of the memory."""
    pages: Size
    strides: Strides
    """Strides of keys and values: bytes from one page, layer, plane (K or V), head and slot to the next."""
    offset: Size = field(default_factory=int)  # a factory has msgspec write it even when it is 0
    """Byte at which the first page's keys and values begin."""
    components: Annotated[tuple[Placement, ...], Meta(max_length=MAX_COMPONENTS)] = ()
    state_slots: Size = 0
    """Requests whose states have a place: what the components that are states have in the place of pages."""


class SharedMemory(PoolLayout, frozen=True):
    """A pool whose memory is a file of /dev/shm that other processes of the host may map."""

    host: HostToken
    """Equal for all processes that see the same /dev/shm."""
    name: FileName
    """Name of the file in /dev/shm."""


class CudaIpcMemory(PoolLayout, frozen=True):
    """A pool in the memory of a GPU, which processes of the host may map by CUDA IPC."""

    host: HostToken
    """Equal for all processes that see the same /dev/shm."""
    name: FileName
    """Name of the file in /dev/shm that says how to map it, and whose locks are the right to write."""
    device: Gpu
    """UUID of the GPU."""


class NixlMemory(PoolLayout, frozen=True):
    """A pool whose memory can be written through NIXL; NixlAccess says at which address it begins."""

    version: Version
    """Version of NIXL; both sides need the same."""
    device: Annotated[int, Meta(ge=-1, le=1023)] = -1
    """Number of the GPU whose memory it is, as its owner counts them; -1 for the memory of the host."""


class NixlAccess(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill stage needs to write into a NixlMemory during one session."""

    metadata: AgentMetadata
    """Metadata of the NIXL agent that the pool is registered with."""
    address: Size
    """Where the pool's memory begins."""


class PoolMemory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a peer can write into the pool of one stage; None where it cannot."""

    shm: SharedMemory | None = None
    nixl: NixlMemory | None = None
    cuda_ipc: CudaIpcMemory | None = None


def writes_directly(backend: str) -> bool:
    """Whether the sender writes into the peer's pages itself, so that the peer cannot reject a write."""
    return backend in (CUDA_IPC, SHM, NIXL)
