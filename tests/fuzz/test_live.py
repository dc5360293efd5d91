"""A live prefill server under fire on every port: rubbish, spoilt messages, huge frames, connections that never speak.

Meanwhile an honest peer hands over one prompt after the other. At the end the same processes are there, no larger than
before, with every page back.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq

from server.local import free_port
from tests.conformance.client import Client, Target, answer
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.machines import Machine, Tree
from tests.fuzz.mutations import VALID, Mutator
from tests.fuzz.test_decoders import BODIES
from tests.transfer.harness import zmq_context

MODEL = ("--model", "stand-in:layers=4,hidden=32", "--dtype", "float32", "--kv-pages", "512", "--max-model-len", "2048")
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
    with closing(Server(*flags, *events, "--peer-timeout", "2")) as server:
        command = ["server.cli", "stage", "--scheduler", f"tcp://127.0.0.1:{stage_port}", "--rank", "0"]
        stage = Tree(Machine("127.0.0.1", "127.0.0.1", [], {}), [*command, "--world-size", "1", *key])
        try:
            with running(server):
                handoff = server.get("/v1/handoff").json()
                desk = f"tcp://127.0.0.1:{handoff['desk_port']}"
                yield server, Target(server.url, desk, "127.0.0.1", handoff["fingerprint"], GEOMETRY), stage_port
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


class Attack:
    """Threads that each do one thing to a port until they are told to stop."""

    def __init__(self, context: Any, target: Target, ports: dict[str, int]) -> None:
        self.context, self.target, self.ports = context, target, ports
        self.stopped = threading.Event()
        self.rounds: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self) -> None:
        ways: list[tuple[str, Callable[[Mutator], None]]] = []
        for name, port in self.ports.items():
            ways.append((f"raw {name}", lambda mutator, port=port: self.raw(mutator, port)))
            if name != "http":
                ways.append((f"messages {name}", lambda mutator, port=port: self.messages(mutator, port)))
        ways += [("session", self.session), ("data", self.data), ("http", self.http), ("huge", self.huge)]
        for seed, (name, way) in enumerate(ways):
            thread = threading.Thread(target=self._keep, args=(name, way, Mutator(seed)), name=name)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), thread.name
        assert not self._errors, self._errors
        assert all(self.rounds.values()), self.rounds

    def _keep(self, name: str, way: Callable[[Mutator], None], mutator: Mutator) -> None:
        self.rounds[name] = 0
        try:
            while not self.stopped.wait(0.02):
                way(mutator)
                self.rounds[name] += 1
        except BaseException as error:
            self._errors.append(error)

    def raw(self, mutator: Mutator, port: int) -> None:
        """No ZMTP and no HTTP, or the beginning of it."""
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            for data in (mutator.spoil(greeting), mutator.rubbish(), mutator.any(VALID)):
                connection.sendall(data)
                time.sleep(0.002)

    def messages(self, mutator: Mutator, port: int) -> None:
        """Well-framed messages that are none, some of many frames."""
        with self._dealer(port) as dealer:
            for _ in range(30):
                frames = [mutator.any(VALID) for _ in range(mutator.random.choice((1, 1, 1, 2, 40)))]
                dealer.send_multipart(frames)

    def session(self, mutator: Mutator) -> None:
        """A peer that is welcomed and then says what it likes, and leaves without a word."""
        with self._client() as client:
            client.hello(kv_pages=mutator.random.choice((64, 1 << 30)))
            valid = [
                msgspec.msgpack.encode(message)
                for message in (
                    {"type": "Reserve", "ticket": "f", "generation": 1, "prompt_tokens": 40, "cached_tokens": 0,
                     "pages": bytes(12), "row": 0},
                    {"type": "Cancel", "ticket": "f", "generation": 1},
                    {"type": "Ping", "number": 1, "renew": ["f", "g"]},
                )
            ]  # fmt: skip
            for _ in range(40):
                client.desk.send(mutator.any(valid))

    def data(self, mutator: Mutator) -> None:
        """A peer that attaches, and answers chunks that it never got."""
        with self._client() as client:
            if client.hello()["type"] != "Welcome":
                return  # the quota of peers is used up
            data = client.attach()
            valid = [
                msgspec.msgpack.encode({"type": kind, "ticket": "t", "generation": 1, "chunk": 0, **fields})
                for kind, fields in (("Ack", {}), ("Nack", {"code": "c", "message": "m"}))
            ]
            for _ in range(40):
                data.send(mutator.any(valid))

    def http(self, mutator: Mutator) -> None:
        """Bodies that are none, headers that lie, and requests that are given up."""
        paths = ("/v1/prefill", "/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/%00")
        path = mutator.random.choice(paths)
        body = mutator.random.choice((*BODIES[-3:], mutator.any(BODIES[:3])))
        with httpx.Client(base_url=self.target.url, timeout=2) as client, suppress(httpx.HTTPError):
            status = client.post(path, content=body).status_code
            assert status != 500, body
        port = self.ports["http"]
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(b"POST /v1/prefill HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n{")
            connection.sendall(b"POST " + mutator.rubbish())

    def huge(self, mutator: Mutator) -> None:
        """Frames up to, and beyond, what libzmq cuts off; a message of many of them."""
        name = mutator.random.choice([name for name in self.ports if name != "http"])
        with self._dealer(self.ports[name]) as dealer:
            size = mutator.random.choice((1 << 20, (5 << 20) + 1, 12 << 20))
            dealer.send(bytes(size))
            dealer.send_multipart([bytes(1 << 20)] * 4)
            self.stopped.wait(0.2)

    @contextmanager
    def _dealer(self, port: int) -> Iterator[Any]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger, dealer.sndtimeo = 100, 1000
        dealer.connect(f"tcp://127.0.0.1:{port}")
        try:
            with suppress(zmq.Again):
                yield dealer
        finally:
            dealer.close()

    @contextmanager
    def _client(self) -> Iterator[Client]:
        client = Client(self.context, self.target)
        try:
            yield client
        finally:
            for each in client._sockets:
                each.close(linger=50)


def processes(server: Server) -> dict[int, int]:
    """Memory by process: the front end's, the scheduler's, and the stage's, which is a child of this one."""
    ours = [process for process in psutil.Process().children() if "stage" in process.cmdline()]
    family = [psutil.Process(server.process.pid), *server.children(), *ours]
    return {process.pid: process.memory_info().rss for process in family}


@pytest.mark.parametrize("seconds", [pytest.param(6, id="short"), pytest.param(90, id="long", marks=pytest.mark.full)])
def test_a_server_under_fire_serves_on(seconds: float) -> None:
    with everything() as (server, target, stage_port), zmq_context() as context:
        found = re.search(r"data   tcp://127\.0\.0\.1:(\d+)", server.log)
        assert found is not None
        ports = {
            "desk": int(target.desk.rpartition(":")[2]),
            "data": int(found[1]),
            "stages": stage_port,
            "http": server.port,
        }
        honest = Client(context, target)
        honest.hello()
        data = honest.attached()
        hand_over(honest, data, "before")
        idle = [socket.create_connection(("127.0.0.1", port)) for port in ports.values() for _ in range(SLOW)]
        before = processes(server)
        attack = Attack(context, target, ports)
        attack.start()
        deadline, handed_over = time.monotonic() + seconds, 0
        try:
            while time.monotonic() < deadline:
                hand_over(honest, data, f"under-fire-{handed_over}")
                handed_over += 1
        finally:
            attack.stop()
        hand_over(honest, data, "after")
        honest.close()
        for connection in idle:
            connection.close()
        wait_until(lambda: pages_in_use(server) == 0, 20, "pages back")
        wait_until(lambda: server.metrics()["headrace_desk_sessions"] == 0, 20, "sessions over")
        metrics, after = server.metrics(), processes(server)
        assert metrics["headrace_open_tickets"] == 0
        assert metrics['headrace_malformed_frames_total{socket="desk"}'] > 0
        assert metrics['headrace_malformed_frames_total{socket="data"}'] > 0
        assert metrics['headrace_malformed_frames_total{socket="stages"}'] > 0
        assert after.keys() == before.keys(), "no process has ended, and none was started in another's place"
        growth = {pid: after[pid] - before[pid] for pid in after}
        assert max(growth.values()) < GROWTH_BYTES, growth
        assert "Traceback" not in server.log
        print(f"{handed_over} prompts handed over; rounds {attack.rounds}; growth {growth}")
