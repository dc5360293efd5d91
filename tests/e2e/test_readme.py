"""The README's pair, by its own commands."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.deployment.readme import CURL, DECODE, PREFILL, with_ports

READY_S = 180.0


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command of the README, with the environment's programs first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(command, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(60) == 0


def until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"port {port} does not serve; exit status {process.poll()}")


@pytest.mark.full
def test_a_pair_as_the_readme_starts_it() -> None:
    ports = {"8000": free_port(), "8001": free_port()}
    with (
        started(*with_ports(PREFILL, ports)) as prefill,
        started(*with_ports(DECODE, ports)) as decode,
    ):
        until_ready(ports["8000"], prefill)
        until_ready(ports["8001"], decode)
        answer = subprocess.run([*with_ports(CURL, ports), "-sS", "--noproxy", "*"], capture_output=True, check=True)
    events = [line.removeprefix("data: ") for line in answer.stdout.decode().splitlines() if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert len("".join(texts)) > 20
