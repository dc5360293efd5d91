"""A loop over ports, and a prefill and a decode side joined by real sockets on loopback."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, OpenSession, PrepareReceive, SendChunk
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.event_loop import EventLoop, EventSource
from headrace.core.types.kv.backends import FAKE, SHM, ZMQ, PoolMemory
from headrace.core.types.kv.geometry import KV, Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms, PrefillTerms
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.backends.base import FakeTransport, RegisteredPool, Transport
from headrace.transfer.backends.shm import SharedPool, ShmTransport
from headrace.transfer.backends.strided_pool import ArrayPageStore, StridedPool, c_order
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.data.sender import Sender
from headrace.transfer.protocol.layout import pages_for

E = TypeVar("E")
AnyPort = EventSource[Any, Any]
CLOCK = SystemClock()
FIRST = FirstToken(token=42, prompt_tokens=64, cached_tokens=0)
CONFIG = TransferConfig(peer_timeout_s=1.0, window_bytes=1 << 20)


@contextmanager
def zmq_context() -> Iterator[Any]:
    """A context whose end does not wait for messages that are still queued."""
    context: Any = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


class Loop:
    """Polls ports and keeps the events of each, in order."""

    def __init__(self, *ports: AnyPort) -> None:
        self.ports = ports
        self._loop = EventLoop(ports, zmq.Poller, CLOCK)
        self.events: dict[AnyPort, list[Any]] = {port: [] for port in ports}
        self.raw: list[Any] = []  # sockets that the test itself reads; they wake the loop and are closed with it

    def apply(self, port: AnyPort, command: Any) -> None:
        self.events[port] += port.apply(command, CLOCK.now())

    def turn(self, wait_s: float = 0.05) -> None:
        self._loop.wait(self.raw, longest_s=wait_s)
        for port, events in self._loop.events():
            self.events[port] += events

    def until(self, condition: Callable[[], object], timeout_s: float = 5.0) -> None:
        """Turn until the condition holds; AssertionError after the timeout."""
        end = CLOCK.now() + timeout_s
        while not condition():
            assert CLOCK.now() < end, f"not reached in {timeout_s} s; events: {list(self.events.values())}"
            self.turn()

    def of(self, port: AnyPort, kind: type[E]) -> list[E]:
        return [event for event in self.events[port] if isinstance(event, kind)]

    def wait_for(self, port: AnyPort, kind: type[E], count: int = 1, timeout_s: float = 5.0) -> E:
        """The count-th event of this kind."""
        self.until(lambda: len(self.of(port, kind)) >= count, timeout_s)
        return self.of(port, kind)[count - 1]

    def close(self) -> None:
        for port in self.ports:
            port.close()
        for socket in self.raw:
            socket.close(linger=0)


def value(stats: Any, name: str, labels: tuple[str, ...] = ()) -> float:
    """The value of a sample, 0 when it is not there."""
    return float(sum(sample.value for sample in stats.samples if (sample.name, sample.labels) == (name, labels)))


def random_store(geometry: Geometry, pages: int, seed: int = 0, memory: memoryview | None = None) -> ArrayPageStore:
    store = ArrayPageStore(geometry, pages, memory)
    scramble(store, seed)
    return store


def scramble(store: StridedPool, seed: int) -> None:
    """Fill a pool with bytes that follow from the seed."""
    random = np.random.default_rng(seed)
    for data in store.tensors.values():
        data[:] = random.integers(0, 256, data.shape, np.uint8)


def gather(
    store: StridedPool, geometry: Geometry, pages: Sequence[int], start: int, count: int, tensor: str = KV
) -> np.ndarray:
    """Token by token: bytes of positions [start, start + count) when pages[0] holds position start. The twin of
    what layout.py does with pages."""
    first = start // geometry.page_size
    tokens = [
        store.tensors[tensor][pages[p // geometry.page_size - first], :, :, :, p % geometry.page_size]
        for p in range(start, start + count)
    ]
    return np.stack(tokens) if tokens else np.zeros(0, np.uint8)


class Pair:
    """One prefill stage and one decode stage, attached."""

    def __init__(
        self,
        context: Any,
        source: Geometry,
        destination: Geometry,
        *,
        config: TransferConfig = CONFIG,
        pages: int = 64,
        session: str = "s" * 32,
        admitted: bool = True,
        connected: bool = True,
        receiver_config: TransferConfig | None = None,
        receiver_context: Any = None,
        server_key: str = "",
        backend: str = ZMQ,
        transports: Mapping[str, Transport] | None = None,
        registered_pools: Mapping[str, RegisteredPool] | None = None,
        memory: PoolMemory | None = None,
        store: ArrayPageStore | None = None,
        target: ArrayPageStore | None = None,
    ) -> None:
        self.source, self.destination, self.backend = source, destination, backend
        self.shared = SharedPool(c_order(destination, pages)) if backend == SHM else None
        shared = PoolMemory(shm=self.shared.memory) if self.shared is not None else None
        self.memory = (memory,) if memory is not None else (shared,) if shared is not None else ()
        self.session = session
        self.window = config.window_bytes
        self.store = store or random_store(source, pages, seed=1)
        self.target = target or random_store(
            destination, pages, seed=2, memory=self.shared.buffer if self.shared else None
        )
        self.sender = Sender(
            config,
            stage=0,
            geometry=source,
            store=self.store,
            context=context,
            transports=transports or {SHM: ShmTransport(), FAKE: FakeTransport()},
        )
        self.server_key = server_key
        self.receiver = Receiver(
            receiver_config or config,
            stage=0,
            geometry=destination,
            store=self.target,
            context=receiver_context or context,
            registered_pools=registered_pools or ({SHM: self.shared} if self.shared is not None else {}),
        )
        self.loop = Loop(self.sender, self.receiver)
        if admitted:
            self.admit()
        if connected:
            self.connect(self.sender.port)

    def admit(self) -> None:
        order = AdmitPeer(
            seq=0,
            terms=PeerTerms(
                session=self.session,
                geometries=(self.destination,),
                window_bytes=self.window,
                backend=self.backend,
                memory=self.memory,
            ),
        )
        self.loop.apply(self.sender, order)

    def connect(self, port: int) -> None:
        order = OpenSession(
            seq=0,
            terms=PrefillTerms(
                session=self.session,
                endpoints=(f"tcp://127.0.0.1:{port}",),
                geometries=(self.source,),
                window_bytes=self.window,
                server_key=self.server_key,
                backend=self.backend,
            ),
        )
        self.loop.apply(self.receiver, order)

    def expect(self, request: int, pages: Sequence[int], start: int, count: int, *, generation: int = 1) -> None:
        self.loop.apply(
            self.receiver,
            PrepareReceive(
                seq=0,
                request=request,
                session=self.session,
                ticket=f"ticket-{request}",
                generation=generation,
                start=start,
                count=count,
                pages=pack(pages),
                row=request % 100,
            ),
        )

    def send(
        self,
        request: int,
        chunk: int,
        start: int,
        count: int,
        *,
        pages: Sequence[int],
        dst_pages: Sequence[int],
        origin: int = 0,
        last: bool = False,
        generation: int = 1,
    ) -> None:
        """Order a chunk. pages and dst_pages are those of the whole request, from position origin on."""
        self.loop.apply(
            self.sender,
            SendChunk(
                after=0,
                seq=0,
                request=request,
                session=self.session,
                ticket=f"ticket-{request}",
                generation=generation,
                chunk=chunk,
                start=start,
                count=count,
                pages=pack(part(self.source.page_size, pages, origin, start, count)),
                dst_pages=pack(part(self.destination.page_size, dst_pages, origin, start, count)),
                row=0,
                dst_row=request % 100,
                last=FIRST if last else None,
            ),
        )

    def close(self) -> None:
        self.loop.close()
        if self.shared is not None:
            self.shared.close()


def part(page_size: int, pages: Sequence[int], origin: int, start: int, count: int) -> list[int]:
    """The pages of [start, start + count) out of a list that begins with the page of position origin."""
    first = start // page_size - origin // page_size
    return list(pages[first : first + pages_for(page_size, start, count)])
