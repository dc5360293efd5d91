"""A command of headrace that serves HTTP, as a child process on a free loopback port: benchmarks, demo, tests."""

import os
import signal
import subprocess
import tempfile
import time
from typing import Any

import httpx

from headrace.core.runtime.process import module_command
from headrace.integrations.http_client import direct_client
from headrace.server.config.settings import BY_KEY
from headrace.server.launch.free_port import free_port

READY_TIMEOUT_S = 300.0
PROBE_TIMEOUT_S = 5.0  # the port may be that of a program that never answers
END_TIMEOUT_S = 40.0
LOG_LINES = 40
KEY_VARIABLES = tuple(BY_KEY[key].flag.variable for key in ("api-key", "prefill-api-key"))  # callers send none


class ServerFailed(Exception):
    """The server exited before it was ready, or does not exit; the message has the last lines of its output."""


class LocalServer:
    """A server process, started by the constructor. port 0: a free one. command: of headrace."""

    def __init__(self, *flags: str, port: int = 0, command: str = "serve") -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            module_command("headrace.cli.commands", command, "--port", str(self.port), *flags),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name not in KEY_VARIABLES},
        )

    @property
    def log(self) -> str:
        """The last lines of its output so far."""
        if self._output.closed:
            return ""
        text = os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:])

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Wait for /ready. Returns the seconds it took. Raises ServerFailed."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"the server exited with status {self.process.returncode} before it was ready:\n{self.log}"
                )
            if self.ready():
                return time.monotonic() - started
            time.sleep(0.1)
        raise ServerFailed(f"the server was not ready within {timeout_s:.0f} s:\n{self.log}")

    def ready(self) -> bool:
        """Whether /ready responds with 200."""
        try:
            return self.request("GET", "/ready", timeout_s=PROBE_TIMEOUT_S).status_code == 200
        except httpx.TransportError:
            return False

    def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float = 600.0
    ) -> httpx.Response:
        """Send one HTTP request. Thread-safe."""
        with direct_client(base_url=self.url, timeout=timeout_s, verify=False) as client:
            return client.request(method, path, json=body)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, SIGTERM to drain it, and wait. Returns the exit status; raises ServerFailed on timeout."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.ended()

    def ended(self) -> int:
        """Wait until it exits. Returns the exit status; raises ServerFailed, and kills it, on timeout."""
        try:
            status = self.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise ServerFailed(f"the server did not exit within {END_TIMEOUT_S:.0f} s:\n{self.log}") from None
        return status

    def close(self) -> None:
        """Kill the server if it still runs, and discard its output."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()
