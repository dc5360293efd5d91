"""KV pool in the memory layout that vLLM's NixlConnector reads: [layer][block][head][token][keys, values][head_dim].

Its memory has further mappings, which can be taken away from those who read them. Where a NIXL reader on the same
machine copies straight out of this process (UCX's cma), it needs no permission of the agent that once told it the
address. What ends its reading is that nothing lies at the address any more. So each agent offers a mapping of its own,
and retire() puts inaccessible memory in its place, which keeps the addresses from being used for something else.
"""

import ctypes
import mmap
import os

import numpy as np

from headrace.core.types.kv.backends import PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.peer.shared_staging import SharedStaging

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


class VllmPool(SharedStaging):
    """Staging area of a gateway: prefill servers write into it, decode engines read from it."""

    def __init__(self, geometry: Geometry, pages: int) -> None:
        """geometry: of the whole model; its page size is the decode engine's block size."""
        self.layout = vllm_layout(geometry, pages)
        super().__init__(geometry, self.layout)

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
            tail = self.view(page, used, self.geometry.page_size - used)
            tail[...] = np.uint8(0)


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

    def __init__(self, file: int, size: int) -> None:
        """file: descriptor of at least size bytes. Raises OSError."""
        self.size = size
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _mmap()(None, size, protection, mmap.MAP_SHARED, file, 0)
        if address == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address

    @property
    def memory(self) -> memoryview:
        """The mapped memory; not to be touched after retire()."""
        return memoryview((ctypes.c_uint8 * self.size).from_address(self.address)).cast("B")

    def retire(self) -> None:
        """Make every access fail from now on. Raises OSError, after which the memory is as before."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        if _mmap()(self.address, self.size, _PROT_NONE, flags, -1, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
