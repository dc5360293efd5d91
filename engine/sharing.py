"""What a stage has for moving KV: the way into peers' pools, and its own pool where peers may write into it."""

import logging

from core.backends import FAKE, SHM, PoolMemory
from core.config import StageConfig
from core.geometry import Geometry
from transfer.backends.base import Exposure, Reach
from transfer.backends.fake import FakeReach
from transfer.backends.shm import SharedPool, ShmReach, host_token

log = logging.getLogger(__name__)


class KvSharing:
    """A prefill stage reaches, a decode stage exposes. backends: those that work here, in the configured order; what
    allocate() could not share is not among them afterwards. host: token of the host's shared memory, or ""."""

    def __init__(self, config: StageConfig) -> None:
        self.host = host_token()
        self.reaches: dict[str, Reach] = {FAKE: FakeReach(), **({SHM: ShmReach()} if self.host else {})}
        self.exposures: dict[str, Exposure] = {}
        self._configured = config.transfer.backends
        self._decodes = config.role == "decode"
        self._on_cpu = config.model.device == "cpu"
        self._pool: SharedPool | None = None

    @property
    def backends(self) -> tuple[str, ...]:
        works = self._pool is not None if self._decodes else bool(self.host)
        return tuple(backend for backend in self._configured if backend != SHM or works)

    @property
    def memory(self) -> PoolMemory | None:
        return PoolMemory(shm=self._pool.memory) if self._pool is not None else None

    def allocate(self, geometry: Geometry, pages: int) -> memoryview | None:
        """Memory for the stage's pool that peers on this host can map. None where nobody is to, or can."""
        if not self._decodes or SHM not in self._configured or not self.host or not self._on_cpu:
            return None
        try:
            self._pool = SharedPool(geometry, pages)
        except OSError as error:
            size = pages * geometry.page_bytes / (1 << 20)
            log.warning("the KV pool (%.0f MiB) cannot be in shared memory: %s; KV comes in frames", size, error)
            return None
        self.exposures[SHM] = self._pool
        return self._pool.buffer

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
