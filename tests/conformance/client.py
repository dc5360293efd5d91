"""A peer driven by hand, in plain maps and msgpack: nothing of ours decides what it says."""

import secrets
import threading
from math import prod
from typing import Any, NamedTuple

import httpx
import msgspec
import zmq

WAIT_MS = 20_000
SIZES = ("layers", "planes", "kv_heads", "head_dim")
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


class Target(NamedTuple):
    """A prefill server. geometry: of a peer that fits it."""

    url: str
    control_server: str
    host: str
    fingerprint: str
    geometry: dict[str, Any]

    @property
    def parts(self) -> list[dict[str, Any]]:
        """What the one stage of a fitting peer has of each component."""
        found: list[dict[str, Any]] = self.geometry.get("components", [])
        return found

    @property
    def components(self) -> list[dict[str, Any]]:
        """As the hello lists them."""
        kinds = ("per_request", "window")
        return [
            {"name": each["name"], "dtype": each["dtype"], "shape": [each[size] for size in SIZES]}
            | {kind: each[kind] for kind in kinds if kind in each}
            for each in self.parts
        ]

    @property
    def has_states(self) -> bool:
        """Requests have states, which go to slots."""
        return any(each.get("per_request") for each in self.parts)

    def payload_bytes(self, count: int, prompt: int = 0) -> int:
        """Of keys, values and components of so many tokens, and of the states that go with the last of them. prompt: of
        the last chunk, how many tokens the prompt has."""
        total = 0
        for each in [self.geometry | {"planes": 2}, *self.parts]:
            sent = count
            if each.get("per_request"):
                sent = min(prompt, each.get("window") or 1)
            total += sent * prod(each[size] for size in SIZES) * ITEM_BYTES[each["dtype"]]
        return total


class NoAnswer(AssertionError):
    """The server has said nothing for WAIT_MS."""


class Client:
    """One control connection, and data connections as asked for."""

    def __init__(self, context: Any, target: Target) -> None:
        self.context, self.target = context, target
        self._sockets: list[Any] = []
        self.control_server = self._connect(target.control_server)
        self.welcome: dict[str, Any] = {}

    def hello(self, **changes: Any) -> dict[str, Any]:
        """Say hello, with changes, and return the answer."""
        fields = {
            "type": "Hello", "protocols": [1], "instance": secrets.token_hex(16), "name": "by-hand", "role": "decode",
            "fingerprint": self.target.fingerprint, "geometries": [self.target.geometry], "kv_pages": 64,
            "max_model_len": 1024, "metadata_version": 1, "metadata_bytes": 256, "metadata_rows": 4,
            "window_bytes": 1 << 20, "checksums": ["xxh3_64"], "backends": ["zmq"],
            "components": self.target.components,
        }  # fmt: skip
        answer = self.ask(fields | changes)
        if answer["type"] == "Welcome":
            self.welcome = answer
        return answer

    def say(self, message: dict[str, Any]) -> None:
        self.control_server.send(msgspec.msgpack.encode(message))

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.say(message)
        return self.heard()

    def heard(self) -> dict[str, Any]:
        """The next thing that the control endpoint says, answers to the pings of take() left out."""
        while (message := self.take(self.control_server)[0]) == {"type": "Pong", "number": 0}:
            pass
        return message

    def take(self, socket: Any) -> tuple[dict[str, Any], list[bytes]]:
        """The next message and the frames after it; meanwhile pings keep the session, however slow the machine is."""
        for _ in range(WAIT_MS // 500):
            if socket.poll(500):
                header, *frames = socket.recv_multipart()
                return msgspec.msgpack.decode(header), frames
            self.say({"type": "Ping", "number": 0})
        raise NoAnswer("no answer")

    def silent(self) -> bool:
        """Whether the control endpoint says nothing but the answer to a ping that is sent now."""
        number = secrets.randbits(32)
        return self.ask({"type": "Ping", "number": number}) == {"type": "Pong", "number": number}

    def reserve(self, ticket: str, generation: int = 1, tokens: int = 40, **changes: Any) -> None:
        pages = b"".join(page.to_bytes(4, "little") for page in range(8, 8 + -(-tokens // 16)))
        fields = {
            "type": "Reserve", "ticket": ticket, "generation": generation, "prompt_tokens": tokens, "cached_tokens": 0,
            "pages": pages, "row": 1,
        }  # fmt: skip
        if self.target.has_states:
            fields["slot"] = 2
        self.say(fields | changes)

    def attach(self, stage: int = 0, **changes: Any) -> Any:
        """A data connection that has said Attach."""
        socket = self._connect(f"tcp://{self.target.host}:{self.welcome['stages'][stage]['data_port']}")
        fields = {"type": "Attach", "session": self.welcome["session"], "stage": stage, "checksum": "xxh3_64"}
        send(socket, fields | changes)
        return socket

    def attached(self) -> Any:
        """A data connection to stage 0 that chunks may come on. A stage may hear of a session later than its peer."""
        while True:
            socket = self.attach()
            message, _ = self.take(socket)
            if message == {"type": "Attached", "stage": 0}:
                return socket
            assert message["code"] == "no_session", message

    def prefill(self, ticket: str, tokens: int = 40, **fields: Any) -> "Prefill":
        return Prefill(self.target.url, ticket, tokens, **fields)

    def _connect(self, endpoint: str) -> Any:
        socket = self.context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(endpoint)
        self._sockets.append(socket)
        return socket

    def close(self) -> None:
        self.say({"type": "Goodbye"})
        for socket in self._sockets:
            socket.close(linger=200)


class Prefill:
    """POST /v1/prefill under way on a thread; answer() waits for its end."""

    def __init__(self, url: str, ticket: str, tokens: int, **fields: Any) -> None:
        body = {
            "prompt_token_ids": [(7 * i + len(ticket)) % 250 for i in range(tokens)],
            "ticket": ticket,
            "max_tokens": 8,
            **fields,
        }
        self._answers: list[httpx.Response] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(httpx.post(f"{url}/v1/prefill", json=body, timeout=60))
        )
        self._thread.start()

    def answer(self) -> httpx.Response:
        self._thread.join(60)
        return self._answers[0]


def send(socket: Any, message: dict[str, Any]) -> None:
    socket.send(msgspec.msgpack.encode(message))


def answer(socket: Any, chunk: dict[str, Any], kind: str = "Ack", **fields: Any) -> None:
    names = {name: chunk[name] for name in ("ticket", "generation", "chunk")}
    send(socket, {"type": kind, **names, **fields})
