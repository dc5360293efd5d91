"""A live prefill server under fire on every port: rubbish, spoilt messages, huge frames, connections that never speak.

Meanwhile an honest peer hands over one prompt after the other. At the end the same processes are there, no larger than
before, with every page back.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psutil
import pytest

from headrace.server.launch.local_server import free_port
from tests.conformance.client import Client, Target, answer
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.machines import Machine, Tree
from tests.transfer.harness import zmq_context

MODEL = ("--model", "stub:layers=4,hidden=32", "--dtype", "float32", "--kv-pages", "512", "--max-model-len", "2048")
GEOMETRY = {"dtype": "float32", "layers": 4, "kv_heads": 1, "head_dim": 32, "page_size": 16}
GROWTH_BYTES = 96 << 20  # of one process; a leak of what is sent here would be many times that
SLOW = 40  # connections that are opened and left alone


@contextmanager
def everything() -> Iterator[tuple[Server, Target, int]]:
    """A prefill server with every kind of port open, what an honest peer needs, and the port for stages."""
    stage_port = free_port()
    key = ("--stage-key", "sesame")
    flags = ("--role", "prefill", *MODEL, "--stages", "external", "--stage-port", str(stage_port), *key)
    events = ("--kv-events-port", str(free_port()), "--kv-events-replay-port", str(free_port()))
    with closing(Server(*flags, *events, "--peer-timeout", "5")) as server:
        command = ["headrace.cli.commands", "stage", "--scheduler", f"tcp://127.0.0.1:{stage_port}", "--rank", "0"]
        stage = Tree(Machine("127.0.0.1", "127.0.0.1", [], {}), [*command, "--world-size", "1", *key])
        try:
            with running(server):
                handoff = server.get("/v1/handoff").json()
                control_server = f"tcp://127.0.0.1:{handoff['control_port']}"
                yield (
                    server,
                    Target(server.url, control_server, "127.0.0.1", handoff["fingerprint"], GEOMETRY),
                    stage_port,
                )
        finally:
            print(stage.log)
            stage.close()


def hand_over(client: Client, data: Any, ticket: str) -> None:
    """One prompt from the server to an honest peer, which acknowledges every chunk."""
    client.reserve(ticket, tokens=200, pages=b"".join(page.to_bytes(4, "little") for page in range(13)))
    prefill = client.prefill(ticket, 200)
    position = 0
    while position < 200:
        chunk, _ = client.take(data)
        assert (chunk["type"], chunk["ticket"], chunk["start"]) == ("Chunk", ticket, position)
        answer(data, chunk)
        position += chunk["count"]
    assert client.heard() == {"type": "Finished", "ticket": ticket, "generation": 1}
    assert prefill.answer().status_code == 200


class Attackers:
    """tests.fuzz.attack as a child process. One that libzmq has aborted is replaced: its sockets are not those under
    test, and this process has to see the test to its end."""

    def __init__(self, target: Target, ports: dict[str, int]) -> None:
        self._told = {"target": target._asdict(), "ports": ports}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.aborted = 0
        self._process = self._started()

    def keep(self) -> None:
        """Have one at work."""
        if self._process.poll() is not None:
            assert self._process.returncode == -signal.SIGABRT, self.log
            self._end()
            self.aborted += 1
            self._process = self._started()

    def stop(self) -> dict[str, int]:
        """Rounds by way of attack, one at least of each."""
        said = ""
        while not said:
            self.keep()
            said, _ = self._process.communicate(timeout=120)
        rounds: dict[str, int] = json.loads(said)
        return rounds

    @property
    def log(self) -> str:
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        print(self.log)
        self._end()
        self._output.close()

    def _end(self) -> None:
        with self._process as process:  # closes its pipes and waits for it
            process.kill()

    def _started(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.attack"]
        made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True)
        assert made.stdin is not None
        print(json.dumps({**self._told, "seed": 100 * self.aborted}), file=made.stdin, flush=True)
        return made


def processes(server: Server) -> dict[int, int]:
    """Memory by process: the front end's, the scheduler's, and the stage's, which is a child of this one."""
    ours = [process for process in psutil.Process().children() if _is_stage(process)]
    family = [psutil.Process(server.process.pid), *server.children(), *ours]
    return {process.pid: process.memory_info().rss for process in family}


def _is_stage(process: psutil.Process) -> bool:
    try:
        return "stage" in process.cmdline()
    except psutil.ZombieProcess:  # of a test that has ended
        return False


@pytest.mark.parametrize("seconds", [pytest.param(3, id="short"), pytest.param(90, id="long", marks=pytest.mark.full)])
def test_a_server_under_fire_serves_on(seconds: float) -> None:
    with everything() as (server, target, stage_port), zmq_context() as context:
        found = re.search(r"data   tcp://127\.0\.0\.1:(\d+)", server.log)
        assert found is not None
        ports = {
            "control_server": int(target.control_server.rpartition(":")[2]),
            "data": int(found[1]),
            "stages": stage_port,
            "http": server.port,
        }
        with closing(Client(context, target)) as honest, ExitStack() as idle:
            honest.hello()
            data = honest.attached()
            hand_over(honest, data, "before")
            for port in [*ports.values()] * SLOW:
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            before = processes(server)
            deadline, handed_over = time.monotonic() + seconds, 0
            with closing(Attackers(target, ports)) as attackers:
                while time.monotonic() < deadline:
                    attackers.keep()
                    hand_over(honest, data, f"under-fire-{handed_over}")
                    handed_over += 1
                rounds = attackers.stop()
            assert all(rounds.values()), rounds
            honest.hello()  # it has been silent while the others came to their ends
            hand_over(honest, honest.attached(), "after")
        wait_until(lambda: pages_in_use(server) == 0, 20, "pages back")
        wait_until(lambda: server.metrics()["headrace_control_sessions"] == 0, 20, "sessions over")
        metrics, after = server.metrics(), processes(server)
        assert metrics["headrace_open_tickets"] == 0
        assert metrics['headrace_malformed_frames_total{socket="control"}'] > 0
        assert metrics['headrace_malformed_frames_total{socket="data"}'] > 0
        assert metrics['headrace_malformed_frames_total{socket="stages"}'] > 0
        assert after.keys() == before.keys(), "no process has ended, and none was started in another's place"
        growth = {pid: after[pid] - before[pid] for pid in after}
        assert max(growth.values()) < GROWTH_BYTES, growth
        assert "Traceback" not in server.log
        print(f"{handed_over} prompts handed over; rounds {rounds}; aborted {attackers.aborted}; growth {growth}")
