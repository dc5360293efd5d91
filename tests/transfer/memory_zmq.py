"""ZMQ sockets in memory, under a virtual clock, with a network between them that loses, repeats, reorders and cuts.

Control endpoint, Control client, Sender and Receiver run on them unchanged. A payload is read when it is delivered, as
libzmq reads memory that it was given without a copy, and has to be by then what it was when it was sent: a page reused
too early is found.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq


@dataclass(frozen=True)
class Faults:
    """Probabilities for each message, and the longest delay in seconds. A delay reorders."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    cut: float = 0.0
    damage: float = 0.0
    """That a byte of a payload or metadata row, in a frame, is not the one that was sent."""

    longest_s: float = 1.0


class Frame:
    """What recv_multipart(copy=False) returns."""

    def __init__(self, data: bytes) -> None:
        self.bytes = data
        self.buffer = memoryview(data)

    def __len__(self) -> int:
        return len(self.buffer)

    def get(self, option: int | str) -> Any:
        """No connection here has a descriptor that could be closed."""
        raise zmq.ZMQError(zmq.EINVAL)


class Tracker:
    done = False


class Connection:
    """A DEALER and the ROUTER it reached, under the routing id of this connection."""

    def __init__(self, dealer: "Socket", router: "Socket", route: bytes) -> None:
        self.dealer, self.router, self.route = dealer, router, route
        self.open = True


class Network:
    """A simulated network: bound sockets, messages under way, and the time."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.listeners: dict[int, Socket] = {}
        self.dealers: list[Socket] = []
        self.routes = 0
        self.crawl: dict[Socket, float] = {}  # seconds that every message of this DEALER's connection takes longer
        self.damaged = 0
        self._flying: Counter[bytes] = Counter()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._port = 20000

    def free_port(self) -> int:
        self._port += 1
        return self._port

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, action))

    def advance(self, to: float) -> bool:
        """Let everything happen that is due by then; the clock stops after the first of it. False when nothing is."""
        if self._events and self._events[0][0] <= to:
            self.now, _, action = heapq.heappop(self._events)
            action()
            return True
        self.now = to
        return False

    def carry(self, connection: Connection, target: "Socket", frames: list[Any], trackers: list[Tracker]) -> None:
        """Put a message under way. Its memory is in use until no copy of it is."""
        faults, chance = self.faults, self.random.random
        if chance() < faults.cut:
            self.cut(connection)
        copies = 0 if chance() < faults.drop else 2 if chance() < faults.repeat else 1
        left = [max(copies, 1)]
        damage = trackers and len(frames) > 1 and chance() < faults.damage
        header, sent = bytes(frames[0]) if trackers else b"", [bytes(frame) for frame in frames]
        self._flying[header] += left[0]

        def deliver() -> None:
            assert sent == [bytes(frame) for frame in frames], "memory was reused while a message referred to it (G3)"
            if copies and connection.open and not target.closed:
                head = [connection.route] if target is connection.router else []
                target.inbox.append([*head, *(self._damaged(sent) if damage else sent)])
            left[0] -= 1
            self._flying[header] -= 1
            for tracker in trackers if not left[0] else ():
                tracker.done = True

        for _ in range(left[0]):
            late = self.random.uniform(0, faults.longest_s) if chance() < faults.delay else 0.0
            self.after(0.001 + late + self.crawl.get(connection.dealer, 0.0), deliver)

    def _damaged(self, frames: list[bytes]) -> list[bytes]:
        """The frames with one byte of the last one changed."""
        self.damaged += 1
        *others, last = frames
        place = self.random.randrange(len(last)) if last else 0
        return [*others, last[:place] + bytes([last[place] ^ 0x10]) + last[place + 1 :]] if last else frames

    def flying(self, ticket: str, generation: int) -> bool:
        """Whether a payload of this use is under way."""
        mine = (msgspec.msgpack.decode(header) for header, copies in self._flying.items() if copies and header)
        return any((header["ticket"], header["generation"]) == (ticket, generation) for header in mine)

    def cut(self, connection: Connection) -> None:
        """The connection breaks, with all that is under way on it; the DEALER connects again, as libzmq does."""
        connection.open = False
        connection.router.routes.pop(connection.route, None)
        if connection.dealer.connection is connection:
            connection.dealer.connection = None
        self.after(0.01, self.connect)

    def connect(self) -> None:
        """Connect every DEALER whose address has a listener, and hand over what it has queued."""
        for dealer in self.dealers:
            router = self.listeners.get(dealer.address)
            if dealer.connection is None and router is not None:
                self.routes += 1
                route = self.routes.to_bytes(5, "big")
                dealer.connection = router.routes[route] = Connection(dealer, router, route)
                while dealer.waiting and dealer.connection is not None:
                    self.carry(dealer.connection, router, dealer.waiting.popleft(), [])


class Context:
    """Makes sockets of one network."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def socket(self, kind: int) -> "Socket":
        return Socket(self.network, kind)


class Socket:
    """As much of a ROUTER or a DEALER as transfer/sockets/zmq_sockets.py uses.
    A PAIR, for the events of a monitor, gets none."""

    def __init__(self, network: Network, kind: int) -> None:
        self.network, self.kind = network, kind
        self.inbox: deque[list[bytes]] = deque()
        self.waiting: deque[list[Any]] = deque()
        self.routes: dict[bytes, Connection] = {}
        self.connection: Connection | None = None
        self.address = 0
        self.closed = False
        self._parts: list[Any] = []
        self._trackers: list[Tracker] = []

    def setsockopt(self, option: int, value: int) -> None:
        """There is no queue to bound and no silence to notice here."""

    def bind_to_random_port(self, address: str) -> int:
        self.address = self.network.free_port()
        self.bind(f"{address}:{self.address}")
        return self.address

    def bind(self, address: str) -> None:
        self.address = int(address.rpartition(":")[2])
        self.network.listeners[self.address] = self
        self.network.connect()

    def monitor(self, address: str, events: int) -> None:
        """Reports no events."""

    def disable_monitor(self) -> None: ...

    def connect(self, address: str) -> None:
        if self.kind == zmq.PAIR:
            return
        self.address = int(address.rpartition(":")[2])
        self.network.dealers.append(self)
        self.network.connect()

    def recv_multipart(self, flags: int, copy: bool = True) -> list[Any]:
        if not self.inbox:
            raise zmq.Again
        frames = self.inbox.popleft()
        return frames if copy else [Frame(frame) for frame in frames]

    def send_multipart(self, frames: Sequence[Any], flags: int) -> None:
        for index, frame in enumerate(frames):
            self.send(frame, flags | (zmq.SNDMORE if index + 1 < len(frames) else 0))

    def send(self, frame: Any, flags: int, copy: bool = True, track: bool = False) -> Tracker:
        if self.kind == zmq.ROUTER and not self._parts and bytes(frame) not in self.routes:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        tracker = Tracker()
        self._parts.append(bytes(frame) if copy else frame)
        self._trackers += [] if copy else [tracker]
        if not flags & zmq.SNDMORE:
            frames, trackers, self._parts, self._trackers = self._parts, self._trackers, [], []
            self._put(frames, trackers)
        return tracker

    def _put(self, frames: list[Any], trackers: list[Tracker]) -> None:
        if self.kind == zmq.ROUTER:
            connection = self.routes[frames[0]]
            self.network.carry(connection, connection.dealer, frames[1:], trackers)
        elif self.connection is None:
            self.waiting.append(frames)
        else:
            self.network.carry(self.connection, self.connection.router, frames, trackers)

    def close(self, linger: int | None = None) -> None:
        self.closed = True
        if self.kind == zmq.ROUTER:
            if self.network.listeners.get(self.address) is self:
                del self.network.listeners[self.address]
            for connection in list(self.routes.values()):
                self.network.cut(connection)
        elif self in self.network.dealers:
            self.network.dealers.remove(self)
            if self.connection is not None:
                self.network.cut(self.connection)
