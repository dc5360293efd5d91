"""Programs on a bad network in virtual time: what the sides of a schedule have in common."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.core.config import TransferConfig
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.requests.draft import NO_DRAFT, Draft, DraftTerms, DraftTokens, HiddenStates
from headrace.transfer.backends.strided_pool import ArrayPageStore
from tests.transfer.harness import AnyPort
from tests.transfer.memory_agents import MemoryAgents
from tests.transfer.memory_pools import MemoryPools
from tests.transfer.memory_zmq import Network

PAGES = 32
STATE = "state"  # name of the component that is one
PATIENCE_S = 3.0  # of either side, for progress of one ticket
POISON = 0xEE
CONFIG = TransferConfig(peer_timeout_s=2.0, window_bytes=4096, control_port=7000)
TIMEOUT = ErrorInfo(code="transfer_timeout", message="no acknowledgement", status=504)


def content(ticket: str, generation: int, position: int, size: int) -> np.ndarray:
    """The KV of a position: other bytes for every use of every ticket."""
    number = (hash((int(ticket[1:]), generation, position)) * 0x9E3779B97F4A7C15) % (1 << 64)
    return np.resize(np.frombuffer(number.to_bytes(8, "little"), np.uint8), size)


def draft_of(ticket: str, generation: int, prompt_tokens: int, terms: DraftTerms) -> Draft | None:
    """The draft data of a use that asks for some."""
    if terms == NO_DRAFT:
        return None
    state = content(ticket, generation, prompt_tokens, 24).tobytes()
    hidden = HiddenStates(prompt_tokens - 1, 6, "float32", state) if terms.hidden else None
    return Draft(hidden, DraftTokens((generation, 3), (0.5, 0.25)).best(terms.top_k))


def slots_of(store: ArrayPageStore, page: int, slot: int, position: int) -> Iterator[tuple[np.ndarray, int]]:
    """A slot in each tensor of a pool, and a number for what is there: other bytes for every tensor of a position."""
    for number, data in enumerate(paged(store)):
        yield data[page, ..., slot, :], position + 1000 * number


def paged(store: ArrayPageStore) -> list[np.ndarray]:
    """The tensors that have pages."""
    return [data for name, data in store.tensors.items() if name != STATE]


def state_of(store: ArrayPageStore, slot: int, tokens: int) -> Iterator[tuple[np.ndarray, int]]:
    """The state in a slot, and a number for what is there; nothing where the pool has no states."""
    if slot >= 0:
        yield store.tensors[STATE][slot], tokens + 10_000


def all_slots(store: ArrayPageStore) -> list[int]:
    """Slots of a pool for states."""
    return list(range(len(store.tensors.get(STATE, ()))))


def poison(store: ArrayPageStore, pages: list[int] | slice, slots: list[int]) -> None:
    for data in paged(store):
        data[pages] = POISON
    if slots:
        store.tensors[STATE][slots] = POISON


class Side:
    """What both sides are made of: ports of this process, and how to kill it."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.ports: list[AnyPort] = []

    def apply(self, port: AnyPort, command: Any) -> None:
        self.take(port.apply(command, self.world.network.now))

    def take(self, events: list[Any]) -> None:
        for event in events:
            self.handle(event)

    def handle(self, event: Any) -> None:
        raise NotImplementedError

    def turn(self) -> None:
        """Read what has come, and say what is due."""
        now = self.world.network.now
        for port in self.ports:
            for socket in port.sockets():
                if socket.inbox:
                    self.take(port.receive(now))
                    break
            due = port.next_deadline()
            if due is not None and due <= now:
                self.take(port.tick(now))

    def next_deadline(self) -> float | None:
        """When turn() is due next."""
        dues = [due for port in self.ports if (due := port.next_deadline()) is not None]
        return min([*dues, *self.deadlines()], default=None)

    def deadlines(self) -> list[float]:
        """Of the tickets that this side itself has to move on."""
        raise NotImplementedError

    def check(self) -> None:
        """AssertionError when a guarantee is broken here and now."""

    def kill(self) -> None:
        """End without a word."""
        for port in self.ports:
            for socket in list(port.sockets()):
                socket.close()  # type: ignore[attr-defined]
        self.ports.clear()


@dataclass
class World:
    """A schedule under way."""

    network: Network
    peer_page_size: int
    pools: MemoryPools
    agents: MemoryAgents
    backend: str = ZMQ
    devices: bool = False
    """Pools are in the memory of GPUs, where the backend can have that."""

    config: TransferConfig = CONFIG
    uses: int = 0
    ids: int = 0
    sides: list[Side] = field(default_factory=list)

    def new_id(self) -> str:
        self.ids += 1
        return f"{self.ids:032x}"

    def run(self, until: float) -> None:
        """A side's turn comes when something was delivered, or when it is due."""
        network = self.network
        moved = True
        dues: dict[Side, float] = {}
        while network.now < until:
            for side in self.sides:
                if moved or dues[side] <= network.now:
                    side.turn()
                    due = side.next_deadline()
                    dues[side] = until if due is None else due
            moved = network.advance(max(network.now + 1e-4, min([until, *dues.values()])))
            for side in self.sides:
                side.check()
