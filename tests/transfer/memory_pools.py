"""Pools that others write into, in memory and under a virtual clock: a backend whose writes take their time.

A write lands piece by piece, whatever its process does meanwhile, as that of a network card would. Until it is over the
source has to stay what it was. The rights to write are as in transfer/backends/writer_locks.py: the side that has one
first decides, and a process that is killed loses its own.
"""

import random
from collections import Counter

from headrace.core.types.kv.backends import NixlAccess, PoolMemory, SharedMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed
from tests.transfer.memory_zmq import Network

HOST = "one host"


class Landing:
    """The Write of the pieces since the last flush."""

    lost = ""

    def __init__(self) -> None:
        self.pieces = 0

    @property
    def done(self) -> bool:
        return self.pieces == 0


class MemoryPages(RemotePages):
    """A peer's pool as a sender writes into it."""

    def __init__(self, network: Network, store: ArrayPageStore, longest_s: float) -> None:
        self.closed = False
        self.busy: Counter[tuple[str, int]] = Counter()  # writes under way, by tensor and page or slot
        self._network = network
        self._store = store
        self._longest_s = longest_s
        self._landing = Landing()

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        landing, promised = self._landing, data.copy()
        landing.pieces += 1
        place = box.tensor, page
        self.busy[place] += 1

        def land() -> None:
            if not self.closed:
                assert (data == promised).all(), "memory was reused while it was being written from (G3)"
                self._store.write(page, first_slot, count, data, box)
            self.busy[place] -= 1
            landing.pieces -= 1

        if self._longest_s:
            self._network.after(self._network.random.uniform(0, self._longest_s), land)
        else:
            land()

    def flush(self) -> Landing:
        landing, self._landing = self._landing, Landing()
        return landing

    def close(self) -> Completed:
        self.closed = True
        return Completed()


class MemoryPools:
    """Every pool of a world by its name, and who has the right to write through which session."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network = network
        self.longest_s = random.Random(seed).choice((0.0, 0.0, 0.3))
        self.stores: dict[str, ArrayPageStore] = {}
        self.rights: dict[tuple[str, int], object] = {}  # a MemoryTransport, or the pool's owner

    def share(self, geometry: Geometry, store: ArrayPageStore) -> "SharedStore":
        name = f"pool-{len(self.stores)}"
        self.stores[name] = store
        return SharedStore(self, name, len(store.data))


class SharedStore:
    """The RegisteredPool of a pool."""

    def __init__(self, pools: MemoryPools, name: str, pages: int) -> None:
        self._pools = pools
        shared = SharedMemory(host=HOST, name=name, bytes=1, pages=pages, strides=(0, 0, 0, 0, 0))
        self.memory = PoolMemory(shm=shared)

    def grant(self, session: str) -> None:
        """The hello has said it all."""

    def revoke(self, session: str, stage: int) -> bool:
        return self._pools.rights.setdefault((session, stage), self) is self


class MemoryTransport:
    """The Transport of one process."""

    def __init__(self, pools: MemoryPools) -> None:
        self._pools = pools
        self.opened: dict[str, MemoryPages] = {}

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "Right":
        assert memory.shm is not None
        if self._pools.rights.setdefault((session, stage), self) is not self:
            raise ValueError("the peer has ended the session")
        pages = MemoryPages(self._pools.network, self._pools.stores[memory.shm.name], self._pools.longest_s)
        self.opened[session] = pages
        return Right(self, session, stage, pages)

    def give_up(self, session: str, stage: int) -> None:
        if self._pools.rights.get((session, stage)) is self:
            del self._pools.rights[session, stage]

    def kill(self) -> None:
        """The process is gone, and with it what it was writing."""
        for pages in self.opened.values():
            pages.close()
        for key in [key for key, holder in self._pools.rights.items() if holder is self]:
            del self._pools.rights[key]


class Right(RemotePages):
    """MemoryPages with the right that close() gives up."""

    def __init__(self, transport: MemoryTransport, session: str, stage: int, pages: MemoryPages) -> None:
        self._transport, self._session, self._stage, self._pages = transport, session, stage, pages

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self._pages.write(page, first_slot, count, data, box)

    def flush(self) -> Landing:
        return self._pages.flush()

    def close(self) -> Completed:
        self._transport.give_up(self._session, self._stage)
        return self._pages.close()
