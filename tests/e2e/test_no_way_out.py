"""A decode server connects to the prefill servers that it was configured with, whatever requests say."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Server, serving, wait_until

STUB = ("--model", "stub:layers=4,hidden=32", "--dtype", "float32", "--peer-timeout", "2")


class Trap:
    """A port that no process should connect to, and the connections that came."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.visits = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.visits += 1
            connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def trap() -> Iterator[Trap]:
    with closing(Trap()) as made:
        yield made


def outgoing(server: Server) -> list[Any]:
    """TCP connections of the server's processes that were made from inside: not at a port where it listens."""
    family = [psutil.Process(server.process.pid), *server.children()]
    found = [connection for process in family for connection in process.net_connections("tcp")]
    ports = {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    assert ports, "it listens somewhere"
    return [connection for connection in found if connection.laddr.port not in ports]


@contextmanager
def watched(server: Server) -> Iterator[list[Any]]:
    """Looks every few milliseconds, for what is there for a moment only."""
    seen: list[Any] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            seen.extend(outgoing(server))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def test_a_decode_server_connects_to_its_own_prefill_servers_only(trap: Trap) -> None:
    own = closing(Trap())
    with own as configured:
        flags = ("--role", "decode", "--fallback", "local", "--prefill", f"http://{configured.address}", *STUB)
        with serving(*flags) as server, watched(server) as seen:
            wait_until(lambda: configured.visits, 20, "it looks for its own")
            for path, extra in (
                ("/v1/completions", {"bootstrap_host": "127.0.0.1", "bootstrap_port": trap.port, "bootstrap_room": 7}),
                ("/v1/completions", {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1",
                                     "remote_port": trap.port, "remote_engine_id": "e", "remote_request_id": "r"}}),
            ):  # fmt: skip
                server.post(path, {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, **extra})
            time.sleep(0.5)
        assert {connection.raddr.port for connection in seen if connection.raddr} <= {configured.port}
    assert trap.visits == 0
