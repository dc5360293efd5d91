"""A further mapping of a pool's memory at an address of its own, which can be taken away from those who read it.

Where a NIXL reader on the same machine copies straight out of this process (UCX's cma), it needs no permission of the
agent that once told it the address. What ends its reading is that nothing lies at the address any more. So each agent
offers a mapping of its own, and retire() puts inaccessible memory in its place, which keeps the addresses from being
used for something else.
"""

import ctypes
import mmap
import os

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


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
