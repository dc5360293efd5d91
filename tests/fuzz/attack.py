"""What a live server is attacked with, in a process of its own: libzmq aborts when it does not understand itself any
more, and these sockets are put to no good use.

    python -m tests.fuzz.attack    the target, ports by name and a seed in one line of JSON on standard input

It goes on until standard input ends, then prints how many rounds each way of attack had.
"""

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import msgspec
import zmq

from tests.conformance.client import Client, NoAnswer, Target
from tests.fuzz.mutations import VALID, Mutator
from tests.fuzz.test_decoders import BODIES


class Attack:
    """Threads that each do one thing to a port until they are told to stop."""

    def __init__(self, context: Any, target: Target, ports: dict[str, int], seed: int) -> None:
        self.context, self.target, self.ports, self.seed = context, target, ports, seed
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
        for seed, (name, way) in enumerate(ways, self.seed):
            thread = threading.Thread(target=self._keep, args=(name, way, Mutator(seed)), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), thread.name
        assert not self._errors, self._errors

    def _keep(self, name: str, way: Callable[[Mutator], None], mutator: Mutator) -> None:
        self.rounds[name] = 0
        try:
            while self.rounds[name] == 0 or not self.stopped.wait(0.02):
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
                client.control_server.send(mutator.any(valid))

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
            with suppress(NoAnswer):  # in all this noise one may wait in vain
                yield client
        finally:
            for each in client._sockets:
                each.close(linger=50)


def main() -> None:
    told = json.loads(sys.stdin.readline())
    context: Any = zmq.Context()
    attack = Attack(context, Target(**told["target"]), told["ports"], told["seed"])
    attack.start()
    sys.stdin.read()
    attack.stop()
    context.destroy(linger=0)  # not before all are done: libzmq aborts where a socket is closed under its user
    print(json.dumps(attack.rounds))


if __name__ == "__main__":
    main()
