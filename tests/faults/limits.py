"""Faults of limits: a process that may open no more files, and ports with more connections than are served."""

import json
import os
import resource
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import psutil

from tests.e2e.crowd import crowd
from tests.e2e.models import NAME
from tests.faults.cells import Strike
from tests.faults.pair import Pair
from tests.faults.processes import found
from tests.transfer.plain import Plain


def no_descriptors(place: str, victim: str = "") -> Strike:
    """The process can open nothing. victim: is killed meanwhile, so that something has to be opened."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        with ExitStack() as stack:
            for process in found(pair, (place,)):
                stack.enter_context(_full(process))
            for process in found(pair, (victim,)) if victim else ():
                process.send_signal(signal.SIGKILL)
            for relay in pair.relays.values():
                relay.reset()  # connections have to be made anew
            yield

    return strike


def crowded(count: int, link: str) -> Strike:
    """So many idle connections to the prefill server's port of a link."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        ports = dict(zip(pair.relays, pair.prefill.ports, strict=True))
        with crowd(count, *(port for name, port in ports.items() if name.startswith(link))):
            yield

    return strike


@contextmanager
def _full(process: psutil.Process) -> Iterator[None]:
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    lowest_free = next(number for number in range(len(taken) + 1) if number not in taken)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        if process.is_running():
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


def herd(count: int) -> Strike:
    """So many peers at the control endpoint that say hello again as soon as their connection ends."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        handoff = pair.prefill.get("/v1/handoff").json()
        over = threading.Event()
        hello = msgspec.msgpack.encode(_hello(handoff["fingerprint"]))
        peer = threading.Thread(target=_gallop, args=(handoff["control_port"], hello, count, over))
        peer.start()
        for relay in pair.relays.values():
            relay.reset()  # the decode server is one of those that come back
        try:
            yield
        finally:
            over.set()
            peer.join(20)

    return strike


def unread_streams(count: int) -> Strike:
    """So many streams of the decode server that are never read."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        prompt = pair.texts.prompt(20, 20)
        body = json.dumps({"model": NAME, "prompt": list(prompt), "max_tokens": 200, "temperature": 0, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n\r\n"
        with ExitStack() as stack:
            for _ in range(count):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                connection.connect(("127.0.0.1", pair.decode.port))
                connection.sendall((head + body).encode())
            pair.uncounted += count
            yield

    return strike


def _gallop(port: int, hello: bytes, count: int, over: threading.Event) -> None:
    peers = [Plain(port) for _ in range(count)]
    while not over.wait(0.05):
        for index, peer in enumerate(peers):
            peer.say(hello)
            if peer.closed:
                peer.socket.close()
                peers[index] = Plain(port)
    for peer in peers:
        peer.socket.close()


def _hello(fingerprint: str) -> dict[str, Any]:
    """Of a peer with the geometry of the pair, in another instance each time."""
    geometry = {"dtype": "float32", "layers": 4, "kv_heads": 1, "head_dim": 64, "page_size": 16}
    return {
        "type": "Hello", "protocols": [1], "instance": secrets.token_hex(16), "name": "herd", "role": "decode",
        "fingerprint": fingerprint, "geometries": [geometry], "kv_pages": 64, "max_model_len": 1024,
        "metadata_version": 1, "metadata_bytes": 256, "metadata_rows": 4, "window_bytes": 1 << 20,
        "checksums": ["xxh3_64"], "backends": ["zmq"],
    }  # fmt: skip
