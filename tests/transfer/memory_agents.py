"""One-sided writes over a network, in memory and under a virtual clock: as NIXL does them.

A piece lands when the network brings it, whatever has become of its writer meanwhile, unless the owner of the pool has
taken the right back. Some are lost, as far as the writer can tell, and may land long after that.
"""

import random
from collections import Counter

from headrace.core.types.kv.backends import NixlAccess, NixlMemory, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed
from tests.transfer.memory_zmq import Network

VERSION = "in memory"


class AgentWrite:
    """The Write of the pieces since the last flush."""

    def __init__(self) -> None:
        self.lost = ""
        self.closed = False
        self.pieces = 0

    @property
    def done(self) -> bool:
        return self.closed or (not self.lost and self.pieces == 0)


class MemoryAgents:
    """The network between all pools, and the sessions whose rights have been taken back."""

    def __init__(self, network: Network, seed: int) -> None:
        self.network = network
        choices = random.Random(seed)
        self.longest_s = choices.choice((0.0, 0.01, 0.3))
        self.loss = choices.choice((0.0, 0.0, 0.02))
        self.stores: dict[str, ArrayPageStore] = {}
        self.revoked: set[str] = set()

    def share(self, store: ArrayPageStore) -> "AgentRegisteredPool":
        name = f"pool-{len(self.stores)}"
        self.stores[name] = store
        return AgentRegisteredPool(self, name, len(store.data))


class AgentRegisteredPool:
    """The RegisteredPool of a pool."""

    def __init__(self, agents: MemoryAgents, name: str, pages: int) -> None:
        self._agents = agents
        self._name = name
        self.memory = PoolMemory(nixl=NixlMemory(version=VERSION, bytes=1, pages=pages, strides=(0, 0, 0, 0, 0)))

    def grant(self, session: str) -> NixlAccess:
        assert session not in self._agents.revoked
        return NixlAccess(metadata=f"{self._name} {session}".encode(), address=0)

    def revoke(self, session: str, stage: int) -> bool:
        self._agents.revoked.add(session)
        return True


class AgentTransport:
    """The Transport of one process."""

    def __init__(self, agents: MemoryAgents) -> None:
        self._agents = agents
        self.opened: dict[str, AgentPages] = {}

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "AgentPages":
        assert access is not None
        name, granted = access.metadata.decode().split()
        assert granted == session
        pages = self.opened[session] = AgentPages(self._agents, self._agents.stores[name], session)
        return pages

    def kill(self) -> None:
        """The process is gone; what it has put on the network is not."""
        for pages in self.opened.values():
            pages.close()


class AgentPages(RemotePages):
    """As NIXL's."""

    def __init__(self, agents: MemoryAgents, store: ArrayPageStore, session: str) -> None:
        self.closed = False
        self.busy: Counter[tuple[str, int]] = Counter()  # pieces under way, by tensor and page or slot
        self._agents = agents
        self._store = store
        self._session = session
        self._write = AgentWrite()
        self._begun: list[AgentWrite] = []

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        agents, write, promised = self._agents, self._write, data.copy()
        chance = agents.network.random
        write.pieces += 1
        place = box.tensor, page
        self.busy[place] += 1

        def land() -> None:
            if self._session in agents.revoked:
                write.lost = "the owner has gone"
                return
            assert self.closed or write.lost or (data == promised).all(), "memory was reused while it was read (G3)"
            self._store.write(page, first_slot, count, promised, box)
            self.busy[place] -= 1
            write.pieces -= 1

        def lose() -> None:
            write.lost = "the network"
            agents.network.after(chance.uniform(0.0, 3.0), land)

        delay = chance.uniform(0, agents.longest_s)
        agents.network.after(delay, lose if chance.random() < agents.loss else land)

    def flush(self) -> AgentWrite:
        write, self._write = self._write, AgentWrite()
        self._begun.append(write)
        return write

    def close(self) -> Completed:
        self.closed = True
        for write in self._begun:
            write.closed = True
        return Completed()
