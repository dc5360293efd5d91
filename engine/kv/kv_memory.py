"""KV transfer resources of a stage: backends that write into peers' pools, and its own pool registered for peers."""

import logging
import mmap

from msgspec.structs import replace

from headrace.core.config import StageConfig
from headrace.core.types.kv.backends import CUDA_IPC, FAKE, NIXL, SHM, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.peers.addresses import is_loopback
from headrace.engine.kv.cuda_ipc_pages import CudaIpcTransport
from headrace.engine.kv.device_pages import device_memory
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.base import FakeTransport, RegisteredPool, Transport
from headrace.transfer.backends.cuda_driver import LIBRARY, CudaIpc
from headrace.transfer.backends.cuda_ipc import CudaIpcPool
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.shm import SharedPool, ShmTransport
from headrace.transfer.backends.strided_pool import c_order
from headrace.transfer.backends.writer_locks import host_token

log = logging.getLogger(__name__)


class KvMemory:
    """Transports of a prefill stage, or the registered KV pool of a decode stage. close() frees shared memory."""

    def __init__(self, config: StageConfig, driver: str = LIBRARY) -> None:
        """Nothing is allocated or registered before allocate(). driver: library of the GPUs' driver."""
        self.host = host_token()  # of the host's shared memory; "" where there is none
        self.nixl = ""  # version of NIXL; "" where it is not used
        self.unreachable_gpus: tuple[str, ...] = ()  # UUIDs of those that this stage's GPU cannot write into
        # Prefill: by backend, what writes into peers' pools.
        self.transports: dict[str, Transport] = {FAKE: FakeTransport(), **({SHM: ShmTransport()} if self.host else {})}
        self.registered_pools: dict[str, RegisteredPool] = {}  # decode: by backend, this stage's pool for its peers
        self._configured = config.transfer.backends
        self._decodes = config.role == "decode"
        self._loopback = is_loopback(config.transfer.host)
        self._on_cpu = config.model.device == "cpu"
        self._driver = driver
        self._pool: SharedPool | None = None
        self._gpu_pool: CudaIpcPool | None = None
        self._memory = PoolMemory()

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends that work here, in the configured order; complete once allocate() has been called."""
        shm = self._pool is not None if self._decodes else bool(self.host)
        ipc = CUDA_IPC in self.transports or self._gpu_pool is not None
        works = {CUDA_IPC: ipc, SHM: shm, NIXL: bool(self.nixl)}
        return tuple(backend for backend in self._configured if works.get(backend, True))

    @property
    def pool_memory(self) -> PoolMemory | None:
        """How peers can write into this stage's pool; None where they cannot."""
        return self._memory if self._memory != PoolMemory() else None

    def allocate(self, geometry: Geometry, pages: int) -> memoryview | None:
        """Memory for a pool of this many pages that peers can map or that is registered with NIXL.

        None where neither is configured or works: the pool then takes memory of its own.
        """
        memory = self._share(geometry, pages)
        if NIXL in self._configured and self._on_cpu:
            memory = memory or memoryview(mmap.mmap(-1, geometry.pool_bytes(pages)))
            self._register(c_order(geometry, pages), memory)
        return memory

    def register(self, pool: KVPool) -> None:
        """Register the pool of a GPU, which has been allocated there, with NIXL and for CUDA IPC where these are
        configured."""
        if self._on_cpu:
            return
        if NIXL in self._configured:
            self._register(pool.layout, device_memory(pool))
        if CUDA_IPC in self._configured and self.host:
            self._share_on_gpu(pool)

    def close(self) -> None:
        """Remove the names of shared memory."""
        for pool in (self._pool, self._gpu_pool):
            if pool is not None:
                pool.close()

    def _share(self, geometry: Geometry, pages: int) -> memoryview | None:
        if not self._decodes or SHM not in self._configured or not self.host or not self._on_cpu:
            return None
        try:
            self._pool = SharedPool(c_order(geometry, pages))
        except OSError as error:
            size = geometry.pool_bytes(pages) / (1 << 20)
            log.warning("the KV pool (%.0f MiB) cannot be in shared memory: %s", size, error)
            return None
        self._memory = PoolMemory(shm=self._pool.memory)
        self.registered_pools[SHM] = self._pool
        return self._pool.buffer

    def _share_on_gpu(self, pool: KVPool) -> None:
        """Let GPUs of this host write into a decode stage's pool, or a prefill stage into theirs."""
        try:
            ipc = CudaIpc(self._driver)
            if self._decodes:
                self._gpu_pool = CudaIpcPool(pool.layout, device_memory(pool), ipc)
                self._memory = replace(self._memory, cuda_ipc=self._gpu_pool.memory)
                self.registered_pools[CUDA_IPC] = self._gpu_pool
            else:
                self.unreachable_gpus = ipc.unreachable(device_memory(pool).device)
                self.transports[CUDA_IPC] = CudaIpcTransport(pool, ipc)
        except OSError as error:
            log.warning("the KV pool cannot be shared between GPUs of this host (cuda_ipc): %s", error)

    def _register(self, layout: PoolLayout, memory: memoryview | DeviceMemory) -> None:
        try:
            from headrace.transfer.backends.nixl import LOOPBACK, VERSION, NixlRegisteredPool, NixlTransport
        except ImportError as error:
            log.warning("NIXL is not used: %s; install headrace[nixl]", error)
            return
        devices = LOOPBACK if self._loopback else ""
        try:
            if self._decodes:
                pool = NixlRegisteredPool(layout, memory, devices)
                self._memory = replace(self._memory, nixl=pool.memory)
                self.registered_pools[NIXL] = pool
            else:
                self.transports[NIXL] = NixlTransport(memory, devices)
        except OSError as error:
            log.warning("NIXL is not used: %s", error)
            return
        self.nixl = VERSION
