"""A decode engine's HTTP server and side channel, which answer what a test wants."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import zmq

from headrace.gateway.vllm_nixl.wire import AgentMetadata, HandshakePayload
from tests.gateway.vllm_nixl.engines import HASH, MODEL, metadata


class ScriptedEngine:
    """The answers are attributes, which tests change. What is posted is kept.

    Attributes:
        answers: (status, JSON) by path.
        payload: frame of the handshake; None for silence.
    """

    def __init__(self) -> None:
        card = {"id": "smollm2", "root": MODEL, "parent": None, "max_model_len": 4096}
        self.answers: dict[str, tuple[int, Any]] = {
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"object": "list", "data": [card]}),
        }
        self.payload: bytes | None = handshake()
        self.keys: list[str | None] = []
        self.posts: list[tuple[str, Any]] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.keys.append(self.headers["Authorization"])
                self.answer()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.posts.append((self.path, body))
                self.answer()

            def answer(self) -> None:
                status, body = engine.answers.get(self.path, (404, {}))
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._context: Any = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self.side_channel = ("127.0.0.1", self._router.bind_to_random_port("tcp://127.0.0.1"))
        self._running = True
        self._threads = [
            threading.Thread(target=self._http.serve_forever, args=(0.02,)),
            threading.Thread(target=self._listen),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        while self._running:
            if self._router.poll(20):
                identity, empty, _ = self._router.recv_multipart()
                if self.payload is not None:
                    self._router.send_multipart((identity, empty, self.payload, msgspec.msgpack.encode(1.0)))

    def close(self) -> None:
        self._running = False
        self._http.shutdown()
        for thread in self._threads:
            thread.join()
        self._http.server_close()
        self._router.close(linger=0)
        self._context.term()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Clients may leave before they are answered."""


def handshake(agent: AgentMetadata | bytes | None = None, digest: str = HASH) -> bytes:
    encoded = agent if isinstance(agent, bytes) else msgspec.msgpack.encode(agent or metadata())
    return msgspec.msgpack.encode(HandshakePayload(compatibility_hash=digest, agent_metadata_bytes=encoded))


@contextlib.contextmanager
def scripted_engine() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    try:
        yield engine
    finally:
        engine.close()
