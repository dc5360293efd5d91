"""Connections that say nothing take neither the descriptors of a process nor the place of those with a session."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from headrace.core.runtime.event_loop import Poll
from headrace.transfer.sockets.connections import Connections

Context = zmq.Context[zmq.Socket[bytes]]
LIMIT = 8


class Listener:
    """A ROUTER under watch, and the routes that have a session."""

    def __init__(self, context: Context) -> None:
        self.sessions: set[bytes] = set()
        self.connections = Connections(context, "control", LIMIT, has_session=self.sessions.__contains__)
        self.router = context.socket(zmq.ROUTER)
        self.connections.watch(self.router)
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self._poll = Poll(zmq.Poller)

    def turn(self, wait_ms: int = 100) -> list[list[bytes]]:
        """One turn of a loop: the messages that have come."""
        self._poll.readable((self.router, *self.connections.sockets()), wait_ms)
        self.connections.receive(0.0)
        messages = []
        while (message := self.connections.take()) is not None:
            messages.append(message)
        return messages

    def message(self) -> list[bytes]:
        for _ in range(100):
            if messages := self.turn():
                return messages[0]
        raise AssertionError("nothing has come")

    def samples(self) -> dict[str, float]:
        return {sample.name: sample.value for sample in self.connections.statistics()}

    def settle(self, accepted: int) -> None:
        """Until so many connections have been accepted, and closed or kept."""
        for _ in range(100):
            self.turn()
            samples = self.samples()
            if samples["connections"] + samples["connections_closed_total"] >= accepted:
                return
        raise AssertionError(self.samples())

    def close(self) -> None:
        self.connections.close()
        self.router.close(linger=0)


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def listener(context: Context) -> Iterator[Listener]:
    made = Listener(context)
    yield made
    made.close()


def silent(listener: Listener, count: int) -> list[socket.socket]:
    """Connections that will say nothing, one accepted after the other."""
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", listener.port), timeout=10))
        made[-1].recv(10)  # libzmq's greeting: it has been accepted
    return made


def closed(connection: socket.socket, timeout_s: float = 5.0) -> bool:
    connection.settimeout(timeout_s)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_the_oldest_connections_without_a_session_are_closed(listener: Listener) -> None:
    made = silent(listener, 3 * LIMIT)
    listener.settle(3 * LIMIT)
    assert listener.samples() == {"connections": LIMIT, "connections_closed_total": 2 * LIMIT}
    assert all(closed(connection) for connection in made[: 2 * LIMIT])
    newest = made[2 * LIMIT :]
    assert not any(closed(connection, 0.01) for connection in newest)
    for connection in made:
        connection.close()


def test_a_connection_with_a_session_stays_whatever_comes_after_it(context: Context, listener: Listener) -> None:
    peer = context.socket(zmq.DEALER)
    peer.connect(f"tcp://127.0.0.1:{listener.port}")
    peer.send(b"hello")
    route, _ = listener.message()
    listener.sessions.add(route)
    for _ in range(3):
        made = silent(listener, 2 * LIMIT)
        listener.turn()
        for connection in made:
            connection.close()
    peer.send(b"still here")
    assert listener.message() == [route, b"still here"]
    listener.sessions.clear()
    before = listener.samples()["connections_closed_total"]
    made = silent(listener, LIMIT)
    while listener.samples()["connections_closed_total"] == before:
        listener.turn()
    for _ in range(100):  # what was sent to the connection that was closed is lost
        peer.send(b"by a new connection")
        if messages := listener.turn():
            break
    assert messages[0][0] != route
    for connection in made:
        connection.close()
    peer.close(linger=0)


def test_connections_that_end_by_themselves_are_not_counted(listener: Listener) -> None:
    for _ in range(5):
        made = silent(listener, LIMIT)
        for connection in made:
            connection.close()
        while listener.samples()["connections"]:
            listener.turn()
    assert listener.samples() == {"connections": 0, "connections_closed_total": 0}


SCARCE = """
import resource, sys, zmq
from headrace.core.runtime.event_loop import Poll
from headrace.transfer.sockets.connections import Connections
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
context = zmq.Context()
connections = Connections(context, "control", 8)
router = context.socket(zmq.ROUTER)
connections.watch(router)
print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
poll, messages = Poll(zmq.Poller), []
while True:
    poll.readable((router, *connections.sockets()), 100)
    connections.receive(0.0)
    while (message := connections.take()) is not None:
        messages.append(message)
    try:
        open("/proc/self/stat" if sys.platform == "linux" else "/dev/null").close()
    except OSError:
        continue  # what was accepted since is closed in the next turn
    while messages:
        router.send_multipart(messages.pop())
"""


def test_a_process_with_few_descriptors_gets_them_back(context: Context) -> None:
    with subprocess.Popen([sys.executable, "-c", SCARCE], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        made = []
        for _ in range(200):  # more than it may have, and more than the kernel queues
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
            made.append(connection)
        peer = context.socket(zmq.DEALER)
        peer.connect(f"tcp://127.0.0.1:{port}")
        try:
            # Connections whose handshake the kernel repeats are newer: the peer's may be shed before it is answered.
            for _ in range(20):
                peer.send(b"let me in")
                if peer.poll(1000):
                    break
            assert peer.recv(zmq.NOBLOCK) == b"let me in"
            assert child.poll() is None
        finally:
            child.kill()
            peer.close(linger=0)
            for connection in made:
                connection.close()
