"""Lookup of a control port at an HTTP port."""

import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from headrace.integrations.peer.commands import ControlPortReply, LookUpControlPort
from headrace.integrations.peer.lookup import ControlPortLookup
from headrace.server.launch.free_port import free_port

ANSWERS: dict[str, tuple[int, bytes]] = {
    "a control endpoint": (200, b'{"control_port": 7000, "protocol": [1]}'),
    "no port": (200, b'{"control_port": 0}'),
    "too high": (200, b'{"control_port": 70000}'),
    "no number": (200, b'{"control_port": "7000"}'),
    "no json": (200, b"<html>"),
    "not here": (404, b'{"control_port": 7000}'),
    "elsewhere": (307, b'{"control_port": 7000}'),
}


class Web(ThreadingHTTPServer):
    answer: tuple[int, bytes] = (200, b"")
    seen: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Web

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.answer
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


def ask(port: int, api_key: str = "") -> ControlPortReply:
    told: queue.SimpleQueue[ControlPortReply] = queue.SimpleQueue()
    lookups = ControlPortLookup(told.put, api_key)
    lookups.ask(LookUpControlPort(name="n", host="127.0.0.1", port=port))
    found = told.get(timeout=20)
    lookups.close()
    return found


@pytest.mark.parametrize("what", ANSWERS)
def test_only_a_port_is_an_answer(web: Web, what: str) -> None:
    web.answer = ANSWERS[what]
    found = ask(web.server_port, api_key="k")
    assert found.control_port == (7000 if what == "a control endpoint" else 0)
    assert bool(found.reason) == (what != "a control endpoint")
    assert web.seen == [("/v1/handoff", "Bearer k")], "and no redirect is followed"


def test_a_port_without_a_server() -> None:
    found = ask(free_port())
    assert (found.name, found.control_port) == ("n", 0)
    assert "Refused" in found.reason
