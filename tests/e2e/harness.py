"""Real servers as child processes, for end-to-end tests."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One `headrace serve`. Its output is kept and shown when something goes wrong."""

    def __init__(self, *flags: str, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "server.cli", "serve", "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "2"},
        )
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.output.extend(lines)

    @property
    def log(self) -> str:
        return "".join(self.output)

    def wait_ready(self, timeout_s: float = 90) -> "Server":
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                self._reader.join(5)
                raise AssertionError(f"server ended with {self.process.returncode} before it was ready:\n{self.log}")
            try:
                if self.http.get("/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"server not ready within {timeout_s} s:\n{self.log}")

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        with httpx.Client(base_url=self.url, timeout=300, verify=False) as client:  # any thread may call
            return client.post(path, json=body)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its full name, labels included."""
        found = re.findall(r"^(headrace_[^ ]+) (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        """The child process that runs this module."""
        return next(child for child in self.children() if module in child.cmdline())

    def kill(self) -> None:
        """End it as a crash would, and wait until its children have died with it."""
        children = self.children()
        self.process.kill()
        self.process.wait()
        self.http.close()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"processes left behind: {alive}\n{self.log}"
        self._reader.join(5)

    def stop(self, sig: int = signal.SIGTERM) -> int:
        """Have it end and return its exit status; no process may stay behind."""
        children = self.children() if self.process.poll() is None else []
        if children:
            self.process.send_signal(sig)
        return self.ended(children)

    def ended(self, children: list[psutil.Process], timeout_s: float = 40) -> int:
        """The exit status of a server that was told to end, with these children."""
        self.http.close()
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"server did not end within {timeout_s} s:\n{self.log}") from None
        _, alive = psutil.wait_procs(children, timeout=5)
        assert not alive, f"processes left behind: {alive}\n{self.log}"
        self._reader.join(5)
        return status


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    """A ready server for the length of a with block; it must end cleanly."""
    server = Server(*flags)
    try:
        server.wait_ready()
        yield server
    except BaseException:
        if server.process.poll() is None:
            server.kill()
        print(server.log)
        raise
    status = server.stop()
    assert status == 0, f"exit status {status}:\n{server.log}"


@contextmanager
def pair(prefill_flags: tuple[str, ...] = (), decode_flags: tuple[str, ...] = ()) -> Iterator[tuple[Server, Server]]:
    """A prefill server and a decode server that takes its prefill from it."""
    with (
        serving("--role", "prefill", *prefill_flags) as prefill,
        serving("--role", "decode", "--prefill", prefill.url, *decode_flags) as decode,
    ):
        yield prefill, decode


def pages_in_use(server: Server) -> float:
    """Pages neither free nor merely cached."""
    return server.metrics()['headrace_kv_pages{state="leased"}']


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    """Poll a condition on a live server."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
