"""What a stage has for moving KV: the ways into peers' pools, and its own pool where peers may write into it."""

import logging
import mmap

from headrace.core.config import StageConfig
from headrace.core.types.addresses import is_loopback
from headrace.core.types.backends import FAKE, NIXL, SHM, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.transfer.backends.base import RegisteredPool, Transport
from headrace.transfer.backends.fake import FakeTransport
from headrace.transfer.backends.shm import SharedPool, ShmTransport, host_token

log = logging.getLogger(__name__)


class KvMemory:
    """A prefill stage reaches, a decode stage exposes. backends: those that work here, in the configured order; what
    allocate() could not share is not among them afterwards. host: token of the host's shared memory, or "". nixl: the
    version of NIXL, or "" where it is not used; its package is imported only where it is."""

    def __init__(self, config: StageConfig) -> None:
        self.host = host_token()
        self.nixl = ""
        self.reaches: dict[str, Transport] = {FAKE: FakeTransport(), **({SHM: ShmTransport()} if self.host else {})}
        self.exposures: dict[str, RegisteredPool] = {}
        self._configured = config.transfer.backends
        self._decodes = config.role == "decode"
        self._loopback = is_loopback(config.transfer.host)
        self._on_cpu = config.model.device == "cpu"
        self._pool: SharedPool | None = None
        self._memory = PoolMemory()

    @property
    def backends(self) -> tuple[str, ...]:
        shm = self._pool is not None if self._decodes else bool(self.host)
        works = {SHM: shm, NIXL: bool(self.nixl)}
        return tuple(backend for backend in self._configured if works.get(backend, True))

    @property
    def memory(self) -> PoolMemory | None:
        return self._memory if self._memory != PoolMemory() else None

    def allocate(self, geometry: Geometry, pages: int) -> memoryview | None:
        """Memory for the stage's pool that peers can map, or that NIXL knows. None where neither is to be, or can."""
        shared = self._share(geometry, pages)
        if NIXL not in self._configured:
            return shared
        if not self._on_cpu:
            log.warning("NIXL is not used: the KV pool is not on the CPU")
            return shared
        size = pages * geometry.page_bytes
        return self._register(geometry, pages, memoryview(mmap.mmap(-1, size)) if shared is None else shared)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _share(self, geometry: Geometry, pages: int) -> memoryview | None:
        if not self._decodes or SHM not in self._configured or not self.host or not self._on_cpu:
            return None
        try:
            self._pool = SharedPool(geometry, pages)
        except OSError as error:
            size = pages * geometry.page_bytes / (1 << 20)
            log.warning("the KV pool (%.0f MiB) cannot be in shared memory: %s", size, error)
            return None
        self._memory = PoolMemory(shm=self._pool.memory)
        self.exposures[SHM] = self._pool
        return self._pool.buffer

    def _register(self, geometry: Geometry, pages: int, memory: memoryview) -> memoryview:
        try:
            from headrace.transfer.backends.nixl import LOOPBACK, VERSION, NixlRegisteredPool, NixlTransport
        except ImportError as error:
            log.warning("NIXL is not used: %s; install headrace[nixl]", error)
            return memory
        devices = LOOPBACK if self._loopback else ""
        try:
            if self._decodes:
                exposure = NixlRegisteredPool(geometry, pages, memory, devices)
                self._memory = PoolMemory(shm=self._memory.shm, nixl=exposure.memory)
                self.exposures[NIXL] = exposure
            else:
                self.reaches[NIXL] = NixlTransport(memory, devices)
        except OSError as error:
            log.warning("NIXL is not used: %s", error)
            return memory
        self.nixl = VERSION
        return memory
