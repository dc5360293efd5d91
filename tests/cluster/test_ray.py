"""`headrace up` on a Ray cluster of several nodes on this machine: same texts, lost workers and nodes, clean ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from headrace.core.runtime.process import module_command
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import serving

pytestmark = pytest.mark.ray

MODEL = ("--model", "stub:us_per_token=1000", "--served-model-name", "stub", "--role", "colocated",
         "--dtype", "float32", "--threads", "1", "--kv-pages", "256", "--max-model-len", "2048")  # fmt: skip
READY_S, BACK_S, END_S = 90, 60, 30
PROMPT = list(range(1, 200))


class Nodes:
    """A Ray cluster of three nodes, with room for one rank each."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.nodes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._answer("address")

    def lose(self, raylet: int) -> None:
        """Remove the node of this raylet."""
        assert self._process.stdin is not None
        print(raylet, file=self._process.stdin, flush=True)
        self._answer("removed")

    def close(self) -> None:
        self._process.communicate(timeout=READY_S)

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError("the cluster has ended")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


class Up:
    """A running `headrace up`."""

    def __init__(self, address: str, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        command = ("up", "--ray", address, "--port", str(port), "--peer-timeout", "2", *MODEL, *flags)
        self.process = subprocess.Popen(
            module_command("headrace.cli.commands", *command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_ready(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        while not self.ready():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < until, "not ready in time"
            time.sleep(0.2)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def text(self, **fields: Any) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json={**body(), **fields}, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit status and output."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=END_S)
        return self.process.returncode, output


def body() -> dict[str, Any]:
    return {"model": "stub", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def ranks() -> list[psutil.Process]:
    """The processes `headrace stage` on this machine."""
    found = psutil.process_iter(["cmdline"])
    return [
        each
        for each in found
        if each.info["cmdline"] and each.info["cmdline"][3:5] == ["headrace.cli.commands", "stage"]
    ]


def test_lost_ranks_and_nodes_are_replaced(cluster: Nodes) -> None:
    with serving(*MODEL) as alone:
        expected = alone.post("/v1/completions", body()).json()["choices"][0]["text"]
    up = Up(cluster.address, "--pp", "2", "--placement", "STRICT_SPREAD")
    try:
        up.wait_ready(READY_S)
        assert up.text() == expected
        assert len(ranks()) == 2

        ranks()[0].kill()
        time.sleep(1)
        up.wait_ready(BACK_S)
        assert up.text() == expected

        raylets = [worker.parent() for rank in ranks() if (worker := rank.parent()) is not None]
        lost = max(raylet.pid for raylet in raylets if raylet is not None)  # the head started first
        cluster.lose(lost)
        time.sleep(3)
        up.wait_ready(BACK_S)
        assert up.text() == expected
    finally:
        status, output = up.end()
        print(output)
    assert status == 0
    assert "Traceback" not in output
    assert ranks() == []


def test_replicas_are_ranks_too(cluster: Nodes) -> None:
    with serving(*MODEL) as alone:
        expected = alone.post("/v1/completions", body()).json()["choices"][0]["text"]
    up = Up(cluster.address, "--dp", "2")
    try:
        up.wait_ready(READY_S)
        assert [up.text(data_parallel_rank=replica) for replica in (0, 1)] == [expected, expected]
        assert len(ranks()) == 2
    finally:
        status, output = up.end()
        print(output)
    assert status == 0


def test_a_cluster_without_room_is_named(cluster: Nodes) -> None:
    up = Up(cluster.address, "--pp", "2", "--rank-cpus", "64", "--place-timeout", "3")
    output, _ = up.process.communicate(timeout=READY_S)
    assert up.process.returncode == 2
    assert f"--ray {cluster.address}: no room for 2 ranks of 64 CPU each (PACK) within 3 s; free are" in output
    assert "Traceback" not in output


def test_no_cluster_is_named() -> None:
    up = Up("127.0.0.1:1", "--pp", "2")
    output, _ = up.process.communicate(timeout=READY_S)
    assert up.process.returncode == 2
    assert "headrace: --ray 127.0.0.1:1: no Ray cluster can be reached" in output
    assert "Traceback" not in output


def test_ranks_that_cannot_run_end_the_server(cluster: Nodes) -> None:
    up = Up(cluster.address, "--pp", "2", "--max-model-len", "100000", "--rank-cpus", "0.5")
    output, _ = up.process.communicate(timeout=READY_S)
    assert up.process.returncode == 2
    assert "KV pages" in output
    assert ranks() == []
