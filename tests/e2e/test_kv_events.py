"""A router that follows a real server's events: what is cached, what a small pool evicts, a stage that dies."""

import signal
from typing import Any

import msgspec
import pytest
import zmq

from headrace.core.messages.kv_events import AllBlocksCleared, BlockStored, KvEventBatch
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, serving, wait_until
from tests.scheduler.router import Router, name_of

PAGE = 16
POOL = 12
MODEL = "stub:us_per_token=0"


class Subscriber:
    """Asks for everything from the first batch on, then listens; a batch that comes both ways is taken once."""

    def __init__(self, server: Server) -> None:
        (source,) = server.get("/kv_event_sources").json().values()
        assert (source["publisher"], source["topic"], source["block_size"]) == ("zmq", "kv", PAGE)
        self.router = Router()
        self.cleared = 0
        self.parents: list[int | None] = []
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(source["topic"].encode())
        self._live.connect(source["endpoint"])
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(source["replay_endpoint"])
        self.ask()

    def ask(self) -> None:
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(10_000), "no answer to a replay"
            _, _, sequence, payload = self._replay.recv_multipart()
            if sequence == b"\xff" * 8:
                return
            self._take(sequence, payload)

    def listen(self) -> None:
        while self._live.poll(50):
            topic, sequence, payload = self._live.recv_multipart()
            assert topic == b"kv"
            self._take(sequence, payload)

    def knows(self, pages: int) -> bool:
        self.listen()
        return len(self.router.pages) == pages

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, sequence: bytes, payload: bytes) -> None:
        number = int.from_bytes(sequence, "big")
        if number < self._next:
            return
        assert number == self._next, "a gap"
        self._next += 1
        for event in msgspec.msgpack.decode(payload, type=KvEventBatch).events:
            self.cleared += isinstance(event, AllBlocksCleared)
            if isinstance(event, BlockStored):
                self.parents.append(event.parent_block_hash)
            self.router.hear(event)


def prompt(*first: int) -> dict[str, Any]:
    """Four pages and a token; pages begin with the given numbers, so that prompts share the pages they agree in."""
    tokens = [number for page in first for number in [page] * PAGE]
    return {"model": MODEL, "prompt": [*tokens, 1], "max_tokens": 1, "temperature": 0}


@pytest.mark.full
def test_a_router_follows_the_cache_of_a_real_server() -> None:
    ports = ("--kv-events-port", str(free_port()), "--kv-events-replay-port", str(free_port()))
    flags = ("--model", MODEL, "--max-model-len", "150", "--kv-pages", str(POOL))
    with serving("--role", "colocated", *flags, "--page-size", str(PAGE), "--kv-events-topic", "kv", *ports) as server:
        subscriber = Subscriber(server)
        assert server.post("/v1/completions", prompt(40, 41, 42, 43)).status_code == 200
        wait_until(lambda: subscriber.knows(4), 10, "the first prompt's pages")
        answer = server.post("/v1/completions", prompt(40, 41, 52, 53)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE
        wait_until(lambda: subscriber.knows(6), 10, "two pages more, below the common ones")
        common = name_of("", [(40,) * PAGE, (41,) * PAGE])
        assert subscriber.parents == [None, common]
        for number in range(60, 100, 4):
            salted = {**prompt(*range(number, number + 4)), "cache_salt": f"tenant {number}"}
            assert server.post("/v1/completions", salted).status_code == 200
        subscriber.listen()
        assert subscriber.router.kinds["BlockRemoved"] > 0
        cached = server.metrics()['headrace_kv_pages{state="cached"}']
        wait_until(lambda: subscriber.knows(int(cached)), 10, "as many pages as the server has cached")
        assert name_of("tenant 96", [(number,) * PAGE for number in range(96, 100)]) in subscriber.router.pages
        before = subscriber.cleared
        server.child("headrace.engine.stage").send_signal(signal.SIGKILL)
        wait_until(lambda: subscriber.knows(0), 10, "that nothing is cached any more")
        assert subscriber.cleared > before
        wait_until(server.ready, 60, "the stage back")
        assert server.post("/v1/completions", prompt(40, 41, 42, 43)).status_code == 200
        wait_until(lambda: subscriber.knows(4), 10, "pages in the new pool")
        subscriber.ask()
        assert server.metrics()['headrace_kv_events_published_total{event="cleared"}'] == subscriber.cleared
        subscriber.close()
