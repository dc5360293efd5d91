"""Lookup of a control port at an HTTP port."""

import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.core.types.peers.allow_list import parse_allowed
from headrace.peer import lookup
from headrace.peer.commands import ControlPortReply, LookUpControlPort
from headrace.peer.lookup import ControlPortLookup
from headrace.server.launch.free_port import free_port

ANSWERS: dict[str, tuple[int, bytes]] = {
    "a control endpoint": (200, b'{"control_port": 7000, "protocol": [1]}'),
    "no port": (200, b'{"control_port": 0}'),
    "too high": (200, b'{"control_port": 70000}'),
    "no number": (200, b'{"control_port": "7000"}'),
    "no json": (200, b"<html>"),
    "not here": (404, b'{"control_port": 7000}'),
    "elsewhere": (307, b'{"control_port": 7000}'),
    "nested": (200, b"[" * 60_000),
}


class Web(ThreadingHTTPServer):
    answer: tuple[int, bytes] = (200, b"")
    query: tuple[int, bytes] = (404, b"")
    seen: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.query if self.path == "/query" else self.server.answer
        self.send_response(status)
        self.send_header("Location", "/v1/other")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def web() -> Iterator[Web]:
    with Web(("127.0.0.1", 0), Handler) as made:
        made.seen = []
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(port: int, api_key: str = "", allowed: str = "127.0.0.1") -> ControlPortReply:
    told: queue.SimpleQueue[ControlPortReply] = queue.SimpleQueue()
    lookups = ControlPortLookup(told.put, api_key, (parse_allowed(allowed),))
    lookups.ask(LookUpControlPort(name="n", host="127.0.0.1", port=port))
    found = told.get(timeout=20)
    lookups.close()
    return found


@pytest.mark.parametrize("what", ANSWERS)
def test_only_a_port_is_an_answer(web: Web, what: str) -> None:
    web.answer = ANSWERS[what]
    found = ask(web.server_port, api_key="k", allowed=f"127.0.0.1:{web.server_port}")
    assert found.control_port == (7000 if what == "a control endpoint" else 0)
    assert bool(found.reason) == (what != "a control endpoint")
    assert web.seen == [("/v1/handoff", "Bearer k")], "and no redirect is followed"


@pytest.mark.parametrize("allowed", ["127.0.0.1", "127.0.0.1:1", "127.0.0.0/8"])
def test_the_key_is_not_sent_to_what_is_not_named_by_its_port(web: Web, allowed: str) -> None:
    web.answer = (401, b"")
    web.query = (200, b'{"0": {"engine_id": "i", "worker_addr": {"0": {"0": "tcp://127.0.0.1:7000"}}}}')
    found = ask(web.server_port, api_key="k", allowed=allowed)
    assert (found.control_port, found.reason) == (7000, "")
    assert web.seen == [("/v1/handoff", None), ("/query", None)]


@pytest.mark.parametrize("worker_addr", [b"{}", b'{"0": {"0": "tcp://h:99999"}}', b'{"0": {"0": ""}}', b"[]"])
def test_a_query_without_an_address(web: Web, worker_addr: bytes) -> None:
    web.answer = (401, b"")
    web.query = (200, b'{"0": {"engine_id": "i", "worker_addr": ' + worker_addr + b"}}")
    found = ask(web.server_port)
    assert found.control_port == 0
    assert found.reason


def test_an_error_that_nobody_foresaw_is_an_answer_too(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(body: bytes) -> None:
        raise AttributeError("an error that nobody foresaw")

    monkeypatch.setattr(lookup, "parse_query", parse)
    web.answer, web.query = (401, b""), (200, b"{}")
    assert ask(web.server_port).reason == "lookup over HTTP: AttributeError an error that nobody foresaw"


def test_a_port_without_a_server() -> None:
    found = ask(free_port())
    assert (found.name, found.control_port) == ("n", 0)
    assert "Refused" in found.reason
