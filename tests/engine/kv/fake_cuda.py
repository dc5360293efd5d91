"""Pools in the memory of GPUs that are not there, over the double of the driver in fake_cuda.c."""

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.core.types.kv.backends import CudaIpcMemory, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.cuda_ipc_pages import CudaIpcPages, CudaIpcTransport
from headrace.engine.kv.device_pages import device_memory
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.cuda_driver import CudaIpc
from headrace.transfer.backends.cuda_ipc import CudaIpcPool
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import StridedPool, c_order

GAP = 512  # bytes of each allocation before the pool


def compiled(folder: Path) -> str:
    """The double, made with the machine's compiler."""
    library = folder / "libfakecuda.so"
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, Path(__file__).with_suffix(".c")]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return str(library)


class FakeGpus:
    """The double in this process."""

    def __init__(self, library: str) -> None:
        self.library = library
        self._driver = ctypes.CDLL(library)
        self._driver.fake_allocate.argtypes, self._driver.fake_allocate.restype = (ctypes.c_size_t,), ctypes.c_uint64
        self._driver.fake_free.argtypes = (ctypes.c_uint64,)
        self._made: list[int] = []

    def ipc(self) -> CudaIpc:
        return CudaIpc(self.library)

    def allocate(self, size: int) -> DeviceMemory:
        self._made.append(self._driver.fake_allocate(GAP + size))
        return DeviceMemory(self._made[-1] + GAP, size, 0)

    def pool(self, geometry: Geometry, pages: int) -> KVPool:
        """One of a GPU, whose tensors are said to be the CPU's."""
        return OnGpu(geometry, pages, "cpu", lambda *_: memoryview(self.allocate(geometry.pool_bytes(pages)).array()))

    def set(self, name: str, value: int) -> None:
        ctypes.c_int.in_dll(self._driver, f"fake_{name}").value = value

    @property
    def mappings(self) -> int:
        """Allocations of others that are mapped here."""
        return int(self._driver.fake_mappings())

    def free(self) -> None:
        for at in self._made:
            self._driver.fake_free(at)


class OnGpu(KVPool):
    """The pool of a GPU as the transfer sees it."""

    on_device = True


class Queue:
    """A CopyQueue whose copies are done when land() is called, or at once."""

    lost = ""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow
        self.left: list[Callable[[], None]] = []

    def run(self, copies: Callable[[], None]) -> Any:
        self.left.append(copies)
        write = Write(self)
        if not self.slow:
            self.land()
        return write

    def land(self) -> None:
        left, self.left = self.left, []
        for copies in left:
            copies()


class Write:
    """The handle of what a queue has up to now."""

    lost = ""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._until = queue, queue.left[-1]

    @property
    def done(self) -> bool:
        return self._until not in self._queue.left


def share(gpus: FakeGpus, pool: KVPool, clock: Callable[[], float]) -> CudaIpcPool:
    """A decode stage's pool, as its peers find it."""
    return CudaIpcPool(c_order(pool.geometry, pool.pages), device_memory(pool), gpus.ipc(), clock)


def share_with(gpus: FakeGpus, geometry: Geometry, layout: PoolLayout) -> tuple[CudaIpcPool, StridedPool]:
    """A pool with any layout."""
    memory = gpus.allocate(layout.bytes)
    return CudaIpcPool(layout, memory, gpus.ipc()), StridedPool(geometry, layout, memory.array())


def opened(
    gpus: FakeGpus, own: KVPool, geometry: Geometry, memory: CudaIpcMemory, session: str, queue: Queue | None = None
) -> CudaIpcPages:
    """A peer's pool, as stage 0 writes into it."""
    transport = CudaIpcTransport(own, gpus.ipc(), queue or Queue())
    return transport.open(session, 0, geometry, PoolMemory(cuda_ipc=memory))


def filled(pool: KVPool, seed: int) -> KVPool:
    """Any bits."""
    random = torch.Generator().manual_seed(seed)
    pool.memory.random_(0, 256, generator=random)
    return pool
