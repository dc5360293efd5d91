"""Idle TCP connections to the ports of a server on this machine, in a process of their own.

    python -m tests.e2e.crowd COUNT PORT...    prints a line when all are open; ends when standard input does

A connection that the server closes is made anew, a few times a second.
"""

import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

CONNECT_S = 30.0
LIFE_S = 120.0
TURN_S = 0.1
ANEW = 10  # connections made anew in one turn, of all ports together


class Crowd:
    def __init__(self, ports: list[int], count: int) -> None:
        self._open: dict[int, tuple[socket.socket, int]] = {}
        self._poll = select.poll()
        for _ in range(count):
            for port in ports:
                self._connect_one(port, select.POLLOUT)

    def connect(self) -> int:
        """Wait until all are open. Returns how many are."""
        waiting, deadline = set(self._open), time.monotonic() + CONNECT_S
        while waiting and time.monotonic() < deadline:
            for descriptor, _ in self._poll.poll(1000):
                waiting.discard(descriptor)
                self._poll.modify(descriptor, select.POLLIN)
        return len(self._open) - len(waiting)

    def turn(self) -> None:
        """Make some of those anew that have been closed; what servers say is read and ignored."""
        anew = 0
        for descriptor, _ in self._poll.poll(0):
            if anew == ANEW:
                return
            connection, port = self._open[descriptor]
            try:
                over = not connection.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                over = True
            if over:
                self._poll.unregister(descriptor)
                del self._open[descriptor]
                connection.close()
                self._connect_one(port, select.POLLIN)
                anew += 1

    def _connect_one(self, port: int, events: int) -> None:
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(("127.0.0.1", port))
        self._open[connection.fileno()] = (connection, port)
        self._poll.register(connection, events)


@contextmanager
def crowd(count: int, *ports: int) -> Iterator[None]:
    """So many connections to each of the ports for the length of a with block."""
    arguments = [sys.executable, "-m", "tests.e2e.crowd", str(count), *map(str, ports)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == count * len(ports)
            yield
            assert child.poll() is None
        finally:
            child.kill()


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    made = Crowd([int(port) for port in sys.argv[2:]], int(sys.argv[1]))
    print(made.connect(), flush=True)
    end = time.monotonic() + LIFE_S
    while time.monotonic() < end and not select.select([sys.stdin], [], [], TURN_S)[0]:
        made.turn()


if __name__ == "__main__":
    main()
