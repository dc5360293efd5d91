"""CUDA IPC backend: the peer's pool is in the memory of a GPU of this host, which the sending stage's GPU writes into.

    owner (decode stage)                                     writer (prefill stage)
    pool ─► its handle ─► file ─► its lock ─► name           open, check, take the session's lock, map by the handle
    session ends: take that session's lock  ◄── free ──────  last copy done, unmap, close; or the process ends
    wait for TEARDOWN_S

The right to write is as in shared memory, by locks on a file in /dev/shm (writer_locks.py). The file holds what maps
the pool, so that only processes of its user can, and no peer can have a stage map what another program has exported.
A stage keeps its lock until the device has done its last copy (engine/kv/cuda_ipc_pages.py has the writer).

When a process ends, the driver ends what it has queued on its GPUs, and the kernel frees its locks, in whatever order.
So the owner waits for some time after it has the lock. A process that is stopped keeps its lock, and its GPU goes on.
"""

import os
import struct
from collections.abc import Callable
from time import monotonic

from msgspec.structs import asdict

from headrace.core.types.kv.backends import CudaIpcMemory, PoolLayout
from headrace.transfer.backends.cuda_driver import HANDLE_BYTES, CudaIpc, Export
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.writer_locks import OwnedFile, WriterLock, host_token

TEARDOWN_S = 1.0  # within which a driver ends the copies of a process that has ended
_FILE = struct.Struct(f"<{HANDLE_BYTES}sQQ")  # handle, offset of the pool in its allocation, bytes of the pool


class CudaIpcPool:
    """A pool that GPUs of this host may write into. A RegisteredPool."""

    def __init__(
        self, layout: PoolLayout, memory: DeviceMemory, ipc: CudaIpc, clock: Callable[[], float] = monotonic
    ) -> None:
        """layout: of the pool in memory. Raises OSError where it cannot be shared."""
        export, gpu = ipc.export(memory), ipc.gpu(memory.device)
        self._file = OwnedFile(_FILE.size)
        try:
            os.pwrite(self._file.descriptor, _FILE.pack(export.handle, export.offset, layout.bytes), 0)
            self._file.publish()
        except OSError:
            self._file.close()
            raise
        self.memory = CudaIpcMemory(host=host_token(), name=self._file.name, device=gpu, **asdict(layout))
        self._clock = clock
        self._taken: dict[tuple[str, int], float] = {}  # by session and stage, when its lock was taken

    def grant(self, session: str) -> None:
        """Hello has all that peers need."""

    def revoke(self, session: str, stage: int) -> bool:
        """Take the writer's lock, and give the driver time."""
        if not self._file.take(session, stage):
            return False
        now = self._clock()
        return now >= self._taken.setdefault((session, stage), now) + TEARDOWN_S

    def close(self) -> None:
        """Remove the file name."""
        self._file.unpublish()


class MappedPool:
    """A peer's pool, mapped for a GPU of this process, with the right to write there.

    Raises OSError, and ValueError where the file is not an owner's, the session has ended, or the pool has another
    size.
    """

    def __init__(self, memory: CudaIpcMemory, session: str, stage: int, ipc: CudaIpc, device: int) -> None:
        self._ipc, self._device = ipc, device
        self._lock = WriterLock(memory.name, _FILE.size, session, stage)
        try:
            export = _read(self._lock, memory)
            self._allocation = ipc.open(export.handle, device)
        except (OSError, ValueError):
            self._lock.close()
            raise
        self.address = self._allocation + export.offset
        """Where it begins."""

    def close(self) -> None:
        """Unmap it and give the right up; nothing may be under way there."""
        try:
            self._ipc.close(self._allocation, self._device)
        finally:
            self._lock.close()


def _read(lock: WriterLock, memory: CudaIpcMemory) -> Export:
    handle, offset, size = _FILE.unpack(os.pread(lock.descriptor, _FILE.size, 0))
    if size != memory.bytes:
        raise ValueError(f"the pool of the file {memory.name} has {size} bytes and not {memory.bytes}")
    return Export(handle, offset)
