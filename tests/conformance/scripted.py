"""A prefill server that does what the test says, in plain maps and msgpack: nothing of ours decides what it says."""

import json
import secrets
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import msgspec
import xxhash
import zmq

FINGERPRINT = "scripted-model"
LAYERS, HEADS, HEAD_DIM, PAGE = 2, 1, 4, 16
TOKENS = 40
LATENT = {"name": "latent", "dtype": "float32", "layers": 2, "kv_heads": 1, "head_dim": 3, "planes": 1}
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4
TICKET = "ticket-of-40"
TOKEN = 7
WAIT_S = 20.0


class Scripted:
    """A control endpoint, one stage with all layers, and GET /v1/handoff, on loopback. latent: its pool has LATENT,
    too."""

    def __init__(self, context: Any, *, timeout_s: float = 2.0, latent: bool = False) -> None:
        self.timeout_s = timeout_s
        self.latent = latent
        self.geometry: dict[str, Any] = {
            "dtype": "float32", "layers": LAYERS, "kv_heads": HEADS, "head_dim": HEAD_DIM, "page_size": PAGE,
        }  # fmt: skip
        if latent:
            self.geometry["components"] = [LATENT]
        self.control_server, self.stage = (context.socket(zmq.ROUTER) for _ in range(2))
        self.control_port, self.data_port = (
            socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self.control_server, self.stage)
        )
        self.pings = 0
        self._kept: list[tuple[Any, dict[str, Any]]] = []
        self.hello: dict[str, Any] = {}
        self.reserve: dict[str, Any] = {}
        self.control_route = self.data_route = b""
        self.session = secrets.token_hex(16)
        self._http = HTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.control_server.close(linger=0)
        self.stage.close(linger=0)

    def greet(self) -> dict[str, Any]:
        """The peer's next Hello, not yet answered."""
        self.hello = self.heard("Hello")
        return self.hello

    def welcome(self, **changes: Any) -> None:
        fields = {
            "type": "Welcome", "protocol": 1, "session": self.session, "instance": "1" * 32,
            "fingerprint": FINGERPRINT, "stages": [{"rank": 0, "data_port": self.data_port, "geometry": self.geometry}],
            "max_model_len": 1024, "max_tickets": 8, "window_bytes": 1 << 20, "checksum": self.hello["checksums"][0],
            "backend": "zmq", "heartbeat_s": self.timeout_s / 4, "timeout_s": self.timeout_s, "a_later_field": [1],
        }  # fmt: skip
        if self.latent:
            fields["components"] = [{"name": "latent", "dtype": "float32", "shape": [2, 1, 1, 3]}]
        self.say(fields | changes)

    def open(self) -> dict[str, Any]:
        """As far as the Reserve, with the data connection attached."""
        self.greet()
        self.welcome()
        attach = self.came("Attach")
        assert (attach["session"], attach["stage"], attach.get("peer_stage", 0)) == (self.session, 0, 0)
        self.send({"type": "Attached", "stage": 0})
        return self.reserved()

    def reserved(self) -> dict[str, Any]:
        self.reserve = self.heard("Reserve")
        return self.reserve

    def say(self, message: dict[str, Any]) -> None:
        """On the control connection that was heard last."""
        self.control_server.send_multipart((self.control_route, msgspec.msgpack.encode(message)))

    def send(self, message: dict[str, Any], *frames: bytes) -> None:
        """On the data connection that was heard last."""
        self.stage.send_multipart((self.data_route, msgspec.msgpack.encode(message), *frames))

    def heard(self, kind: str) -> dict[str, Any]:
        """The next message of this type on the control connection; pings are answered."""
        return self._until(self.control_server, kind)

    def came(self, kind: str) -> dict[str, Any]:
        """The next message of this type on the data connection."""
        return self._until(self.stage, kind)

    def answer(self) -> dict[str, Any]:
        """The next Ack or Nack."""
        return self._until(self.stage, "Ack", "Nack")

    def quiet(self, kind: str, seconds: float) -> bool:
        """Whether no message of this type comes on the control connection for so long."""
        try:
            self._until(self.control_server, kind, wait_s=seconds)
        except AssertionError:
            return True
        return False

    def kv(self, start: int = 0, count: int = TOKENS) -> list[bytes]:
        """Payload frames of positions [start, start + count): token p has bytes of its own in every layer. Those of the
        component follow the others."""
        cuts = [start, *range((start // PAGE + 1) * PAGE, start + count, PAGE), start + count]
        pieces = [range(first, last) for first, last in pairwise(cuts)]
        tensors = [KV_ROWS, *([LATENT_ROWS] if self.latent else [])]
        return [
            b"".join(token(row, position) for row in rows for position in piece) for rows in tensors for piece in pieces
        ]

    def chunk(
        self, number: int, start: int, count: int, /, *, last: bool = False, **changes: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        """A good chunk of the reservation; changes spoil its header, frames= its frames, row_of= its metadata."""
        size = self.hello["geometries"][0]["page_size"]
        pages = self.reserve["pages"]
        frames = self.kv(start, count) if count else []
        payload = sum(map(len, frames))
        generation = self.reserve["generation"]
        if last:
            frames = [changes.pop("metadata", row(self.reserve["ticket"], generation)), *frames]
        frames = changes.pop("frames", frames)
        header = {
            "type": "Chunk", "ticket": self.reserve["ticket"], "generation": generation, "chunk": number,
            "start": start, "count": count, "row": self.reserve["row"], "payload_bytes": payload,
            "pages": pages[4 * (start // size) : 4 * -(-(start + count) // size)] if count else b"",
            "checksum": xxhash.xxh3_64_intdigest(b"".join(frames)), "total": number + 1 if last else 0,
        }  # fmt: skip
        return header | changes, frames

    def deliver(self, number: int, start: int, count: int, /, *, last: bool = False, **changes: Any) -> dict[str, Any]:
        """Send a chunk; returns its answer."""
        header, frames = self.chunk(number, start, count, last=last, **changes)
        self.send(header, *frames)
        answer = self.answer()
        assert {name: answer[name] for name in ("ticket", "generation", "chunk")} == {
            name: header[name] for name in ("ticket", "generation", "chunk")
        }
        return answer

    def finish(self) -> None:
        names = {name: self.reserve[name] for name in ("ticket", "generation")}
        self.say({"type": "Finished", **names})

    def _until(self, socket: Any, *kinds: str, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Take messages of both connections, answering pings, until one of these has come. The two connections have no
        order between them: what is not asked for now is kept."""
        end = time.monotonic() + wait_s
        while True:
            for index, (came_on, message) in enumerate(self._kept):
                if came_on is socket and message["type"] in kinds:
                    del self._kept[index]
                    return message
            left = end - time.monotonic()
            if left <= 0:
                break
            for ready in zmq.select([self.control_server, self.stage], [], [], left)[0]:
                self._kept.append((ready, self._take(ready)))
        raise AssertionError(f"no {' or '.join(kinds)} within {wait_s} s")

    def _take(self, socket: Any) -> dict[str, Any]:
        route, body = socket.recv_multipart()
        message: dict[str, Any] = msgspec.msgpack.decode(body)
        if socket is self.control_server:
            self.control_route = route
        else:
            self.data_route = route
        if message["type"] == "Ping":
            self.pings += 1
            socket.send_multipart((route, msgspec.msgpack.encode({"type": "Pong", "number": message["number"]})))
        return message

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        """Tells where the control endpoint is."""
        about = {"protocol": [1], "instance": "1" * 32, "control_port": self.control_port, "fingerprint": FINGERPRINT}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(about).encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Not to the test's output."""

        return Handler


KV_ROWS = range(LAYERS * 2 * HEADS)
LATENT_ROWS = range(100, 102)  # one for each of its layers


def token(row: int, position: int) -> bytes:
    """The elements of one position in one layer, of keys or values, or of the component."""
    size = HEAD_DIM if row in KV_ROWS else 3
    return struct.pack(f"<{size}f", *(1000 * row + position + index / 8 for index in range(size)))


def whole(latent: bool = False) -> bytes:
    """All KV of the prompt, [layers, 2, kv_heads, tokens, head_dim], and the component's, [layers, 1, 1, tokens, 3]."""
    rows = [*KV_ROWS, *(LATENT_ROWS if latent else ())]
    return b"".join(token(row, position) for row in rows for position in range(TOKENS))


def row(
    ticket: str,
    generation: int,
    token: int = TOKEN,
    finish: int = 0,
    version: int = 1,
    prompt: int = TOKENS,
    cached: int = 0,
) -> bytes:
    """A metadata row, written out from the table in docs/protocol.md."""
    name = xxhash.xxh3_64_intdigest(ticket.encode())
    head = struct.pack("<HHBBxxQQiiif", version, 0, finish, 0, name, generation, token, prompt, cached, 0.0)
    return head.ljust(256, b"\0")
