"""Real servers as child processes, for end-to-end tests."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

import httpx
import psutil

from headrace.server.launch.local_server import LocalServer


class Server(LocalServer):
    """A server under test: its metrics, its child processes, its violent death. In float32 unless flags name another
    dtype, which "auto" may be on another machine: tests are to do the same everywhere."""

    def __init__(self, *flags: str, port: int = 0, command: str = "serve") -> None:
        dtype = ("--dtype", "float32") if command == "serve" and "--dtype" not in flags else ()
        super().__init__(*dtype, *flags, port=port, command=command)
        self._children: list[psutil.Process] = []

    def started(self) -> "Server":
        """Wait until it would serve."""
        self.wait_ready(120)
        self._children = self.children()
        return self

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.request("POST", path, body)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name, labels included."""
        found = re.findall(r"^(headrace_[^ ]+) (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def total(self, name: str) -> float:
        """A metric over all its labels."""
        return sum(value for sample, value in self.metrics().items() if sample.partition("{")[0] == name)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The child process that runs this module."""
        return next(child for child in self.children() if module in child.cmdline())

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.ended()
        self.close()

    def ended(self) -> int:
        """Its exit status; no process of it may stay behind."""
        status = super().ended()
        _, alive = psutil.wait_procs(self._children, timeout=5)
        assert not alive, f"processes left behind: {alive}\n{self.log}"
        return status


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """A ready server for the length of a with block; it must end cleanly."""
    try:
        yield server.started()
        status = server.end()
        assert status == 0, f"exit status {status}:\n{server.log}"
    finally:
        print(server.log)  # shown when the test fails
        if server.process.poll() is None:
            server.kill()
        server.close()


def serving(*flags: str) -> AbstractContextManager[Server]:
    """A server with these flags, as running() has it."""
    return running(Server(*flags))


@contextmanager
def pair(prefill_flags: tuple[str, ...] = (), decode_flags: tuple[str, ...] = ()) -> Iterator[tuple[Server, Server]]:
    """A prefill server and a decode server that takes its prefill from it; they start at the same time."""
    with (
        closing(Server("--role", "prefill", *prefill_flags)) as prefill,
        closing(Server("--role", "decode", "--prefill", prefill.url, *decode_flags)) as decode,
        running(prefill),
        running(decode),
    ):
        yield prefill, decode


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """All processes of a server, as a debugger or a freezer stops them; they go on afterwards unless they are dead."""
    processes = [psutil.Process(server.process.pid), *server.children()]
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def pages_in_use(server: Server) -> float:
    """Pages neither free nor merely cached."""
    return server.metrics()['headrace_kv_pages{state="leased"}']


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll a condition on a live server."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
