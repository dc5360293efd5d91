"""CUDA IPC by NVIDIA's driver: the memory of a GPU, named for other processes of the host and mapped by them.

The driver's library is called and not CUDA's runtime: its name and its functions do not change with CUDA's version, and
it also says where an allocation begins. The contexts are the ones that torch uses, and its numbers of devices, too.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.transfer.backends.device_memory import DeviceMemory

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1  # have other GPUs of this process reach the mapped memory
_NO_HANDLE = "memory of torch's expandable segments, or of cudaMallocAsync, has no handle: see PYTORCH_CUDA_ALLOC_CONF"


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


_number, _size, _address, _context = ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_to = ctypes.POINTER
_Uuid = ctypes.c_char * 16
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (_number, _to(ctypes.c_char_p)),
    "cuDeviceGet": (_to(_number), _number),
    "cuDeviceGetCount": (_to(_number),),
    "cuDeviceGetUuid_v2": (_to(_Uuid), _number),
    "cuDeviceCanAccessPeer": (_to(_number), _number, _number),
    "cuDevicePrimaryCtxRetain": (_to(_context), _number),
    "cuCtxPushCurrent_v2": (_context,),
    "cuCtxPopCurrent_v2": (_to(_context),),
    "cuMemGetAddressRange_v2": (_to(_address), _to(_size), _address),
    "cuIpcGetMemHandle": (_to(_Handle), _address),
    "cuIpcOpenMemHandle_v2": (_to(_address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_address,),
}


class Export(NamedTuple):
    """How other processes map an allocation."""

    handle: bytes
    offset: int
    """Where in it the exported memory begins, in bytes."""


class CudaIpc:
    """The driver's functions. Raises OSError where there is no driver or no GPU, like its methods for what the driver
    refuses."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._functions = _load(library)
        self._contexts: dict[int, ctypes.c_void_p] = {}  # retained until the process ends
        self._call("cuInit", 0)

    def export(self, memory: DeviceMemory) -> Export:
        """Name an allocation for other processes."""
        base, size, handle = _address(), _size(), _Handle()
        with self._current(memory.device):
            try:
                self._call("cuMemGetAddressRange_v2", base, size, memory.address)
                self._call("cuIpcGetMemHandle", handle, memory.address)
            except OSError as error:
                raise OSError(f"{error}; {_NO_HANDLE}") from error
        if memory.address + memory.nbytes > base.value + size.value:
            raise OSError(f"it is more than one allocation; {_NO_HANDLE}")
        return Export(bytes(handle.bytes), memory.address - base.value)

    def open(self, handle: bytes, device: int) -> int:
        """Map an allocation of another process for a GPU of this one. Returns where it begins. The owner must not free
        it before it is closed."""
        address = _address()
        with self._current(device):
            opened = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", address, opened, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, address: int, device: int) -> None:
        """Unmap it; nothing may be under way there."""
        with self._current(device):
            self._call("cuIpcCloseMemHandle", address)

    def gpu(self, device: int) -> str:
        """UUID of a GPU."""
        uuid = _Uuid()
        self._call("cuDeviceGetUuid_v2", uuid, self._device(device))
        digits = uuid.raw.hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def unreachable(self, device: int) -> tuple[str, ...]:
        """UUIDs of GPUs that this process sees and that a GPU cannot write into."""
        count, can = _number(), _number()
        self._call("cuDeviceGetCount", count)
        found = []
        for other in range(count.value):
            if other != device:
                self._call("cuDeviceCanAccessPeer", can, self._device(device), self._device(other))
                found += [] if can.value else [self.gpu(other)]
        return tuple(found)

    def _device(self, number: int) -> ctypes.c_int:
        device = _number()
        self._call("cuDeviceGet", device, number)
        return device

    @contextlib.contextmanager
    def _current(self, device: int) -> Iterator[None]:
        """A GPU's context for calls of this thread."""
        if device not in self._contexts:
            context = _context()
            self._call("cuDevicePrimaryCtxRetain", context, self._device(device))
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", _context())

    def _call(self, name: str, *arguments: object) -> None:
        status = self._functions[name](*arguments)
        if status:
            said = ctypes.c_char_p()
            self._functions["cuGetErrorName"](status, said)
            raise OSError(f"{name}: {said.value.decode() if said.value else status}")


def _load(library: str) -> dict[str, Any]:
    """The driver's functions by name. Raises OSError."""
    driver, found = ctypes.CDLL(library), {}
    for name, types in _FUNCTIONS.items():
        try:
            found[name] = driver[name]
        except AttributeError as error:
            raise OSError(f"this driver is too old: {error}") from error
        found[name].argtypes = types
    return found
