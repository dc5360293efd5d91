"""KV pool in the memory layout that vLLM's NixlConnector reads: [layer][block][head][token][keys, values][head_dim].

It is in the memory of the host or of a GPU, and the NIXL agent that offers it tells readers which. In that of the host
each agent has a mapping of its own. A reader on the same machine that copies straight out of this process (UCX's cma)
needs no permission of the agent that once told it the address. What ends its reading is that nothing lies there any
more: retire() puts inaccessible memory in its place, which keeps the address from being used for something else.

The memory of a GPU is the same for all agents, and what a reader has mapped by CUDA IPC stays mapped. So there UCX has
to do without (same_host): every read needs the agent, and ends with it.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Protocol

import numpy as np

from headrace.core.types.kv.backends import PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.peer.shared_staging import SharedStaging
from headrace.peer.staging import StagingMemory
from headrace.transfer.backends.device_memory import DeviceMemory

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


def vllm_layout(geometry: Geometry, pages: int) -> PoolLayout:
    """Layout of a pool of these pages; a page is a block. One layer's pages are a region of the connector."""
    [tensor] = geometry.tensors
    slot = tensor.planes * tensor.slot_bytes  # keys and values of a token lie side by side
    head = geometry.page_size * slot
    page = tensor.kv_heads * head
    layer = pages * page
    return PoolLayout(bytes=tensor.layers * layer, pages=pages, strides=(page, layer, tensor.slot_bytes, head, slot))


class PoolRegion(Protocol):
    """The pool's memory as one NIXL agent offers it."""

    @property
    def memory(self) -> memoryview | DeviceMemory:
        """Not to be touched after retire()."""
        ...

    @property
    def same_host(self) -> bool:
        """Whether processes of this host may copy straight out of it, since retire() ends that, too."""
        ...

    def retire(self) -> None:
        """End all access but by agents that are there. Raises OSError, after which it is as before."""
        ...


class VllmStaging(StagingMemory, Protocol):
    """The memory of a VllmPool."""

    def region(self) -> PoolRegion:
        """For a NIXL agent. Raises OSError."""
        ...

    def clear(self, page: int, first_slot: int, count: int) -> None:
        """Set slots to zero, which they are on return."""
        ...

    def close(self) -> None:
        """End all access, and free the memory."""
        ...


class HostStaging(SharedStaging):
    """A VllmStaging in the memory of the host."""

    def region(self) -> "PoolMapping":
        """See VllmStaging."""
        return PoolMapping(self.file, len(self.buffer))

    def clear(self, page: int, first_slot: int, count: int) -> None:
        """See VllmStaging."""
        self.view(page, first_slot, count)[...] = np.uint8(0)


class VllmPool:
    """Pool of a gateway: prefill servers write into it, decode engines read from it."""

    def __init__(
        self, geometry: Geometry, pages: int, make: Callable[[Geometry, PoolLayout], VllmStaging] = HostStaging
    ) -> None:
        """geometry: of the whole model; its page size is the decode engine's block size. make: takes the memory."""
        self.geometry, self.pages = geometry, pages
        self.layout = vllm_layout(geometry, pages)
        self.staging = make(geometry, self.layout)

    def close(self) -> None:
        """See VllmStaging."""
        self.staging.close()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self.layout.strides[0]

    @property
    def region_offsets(self) -> tuple[int, ...]:
        """Where each layer's blocks begin in the pool's memory."""
        return tuple(layer * self.layout.strides[1] for layer in range(self.geometry.layers))

    def zero_tail(self, first_page: int, tokens: int) -> None:
        """Clear what follows the last of these tokens in its page: a decode engine reads whole blocks, and must not see
        another prompt's KV there. first_page: holds the first of the tokens."""
        used = tokens % self.geometry.page_size
        if used:
            page = first_page + tokens // self.geometry.page_size
            self.staging.clear(page, used, self.geometry.page_size - used)


def _mmap() -> "ctypes._NamedFuncPointer":
    function = ctypes.CDLL(None, use_errno=True).mmap
    size, number = ctypes.c_size_t, ctypes.c_int
    function.argtypes, function.restype = (
        (ctypes.c_void_p, size, number, number, number, ctypes.c_long),
        ctypes.c_void_p,
    )
    return function


class PoolMapping:
    """Memory of a file, mapped at an address that is used for nothing else as long as this process lives."""

    same_host = True

    def __init__(self, file: int, size: int) -> None:
        """file: descriptor of at least size bytes. Raises OSError."""
        self.size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap()(None, size, protection, mmap.MAP_SHARED, file, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        self.memory = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
        """Not to be touched after retire()."""

    def retire(self) -> None:
        """Make every access fail from now on. Raises OSError, after which the memory is as before."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _mmap()(self.address, self.size, _PROT_NONE, flags, -1, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
