"""Memory of a gateway's pool on a GPU.

    prefill server ──CUDA IPC, NIXL: written there─────────────────────────────────────────────────► decode engine,
                   ──frames──► block of pinned memory ──copy──► device memory ──scatter──► there       by NIXL

A load is over when its KV has arrived: by the sender's event or NIXL's status where it writes itself, by the event
behind the last scatter of its frames. Only then is it offered to a decode engine.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from headrace.core.types.kv.backends import CUDA_IPC, NIXL, Backend, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.device_pages import LEAST_PINNED_BYTES, DevicePages, device_memory
from headrace.engine.kv.pool import DevicePool, check_piece
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.backends.cuda_driver import LIBRARY, CudaIpc
from headrace.transfer.backends.cuda_ipc import CudaIpcPool
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.nixl import NixlRegisteredPool
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.protocol.layout import WHOLE

log = logging.getLogger(__name__)


class DeviceRegion(NamedTuple):
    """A PoolRegion. It is the same for all agents, so that each read has to need its agent."""

    memory: DeviceMemory
    same_host: bool = False

    def retire(self) -> None:
        """Its agent's end has ended all access."""


class DeviceStaging(DevicePages):
    """A VllmStaging in the memory of a GPU. Its pages are written by one thread, and cleared by another."""

    def __init__(
        self, geometry: Geometry, layout: PoolLayout, device: str, backends: Sequence[Backend], driver: str = LIBRARY
    ) -> None:
        """backends: by which prefill servers may write into it, where they work. driver: library of the GPUs' driver.
        Raises OSError when memory is short, ConfigError when pinned memory is."""
        pool = DevicePool(geometry, layout, device)
        super().__init__(pool, LEAST_PINNED_BYTES)
        self.geometry, self.pages = geometry, layout.pages
        self._region = DeviceRegion(device_memory(pool))
        self._clearing = torch.cuda.Stream(pool.memory.device)  # type: ignore[no-untyped-call]
        shared = self._shared(layout, driver) if CUDA_IPC in backends and host_token() else None
        registered = self._registered(layout) if NIXL in backends else None
        by_name: dict[str, CudaIpcPool | NixlRegisteredPool | None] = {CUDA_IPC: shared, NIXL: registered}
        self._writable = {name: pool for name, pool in by_name.items() if pool is not None}
        self.registered_pools: Mapping[str, RegisteredPool] = self._writable
        memory = PoolMemory(
            cuda_ipc=None if shared is None else shared.memory, nixl=None if registered is None else registered.memory
        )
        self.memory = memory if self._writable else None

    def region(self) -> DeviceRegion:
        """See VllmStaging."""
        return self._region

    def clear(self, page: int, first_slot: int, count: int) -> None:
        """See VllmStaging."""
        check_piece(self._pool.tensors, page, first_slot, count, WHOLE)
        cleared = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._clearing):
            self._pool.tensors[WHOLE.tensor][page, ..., first_slot : first_slot + count, :].zero_()
            cleared.record(self._clearing)
        cleared.synchronize()

    def close(self) -> None:
        """End all access of prefill servers. The memory goes with the last reference."""
        for pool in self._writable.values():
            pool.close()

    def _shared(self, layout: PoolLayout, driver: str) -> CudaIpcPool | None:
        try:
            return CudaIpcPool(layout, self._region.memory, CudaIpc(driver))
        except OSError as error:
            log.warning("the pool cannot be shared between GPUs of this host (cuda_ipc): %s", error)
            return None

    def _registered(self, layout: PoolLayout) -> NixlRegisteredPool | None:
        try:
            return NixlRegisteredPool(layout, self._region.memory)
        except OSError as error:
            log.warning("prefill servers do not write into the pool by NIXL: %s", error)
            return None
