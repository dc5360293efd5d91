"""What hosts do that want a server to fail, each in its process: `python -m benchmarks.attackers KIND PORT...`.

An attacker goes on until it is killed. It speaks plain TCP and reads nothing, or as little as it can.
"""

import json
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, cycle

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # of ZMTP 3.0, without security
_PROPERTIES = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + struct.pack(">I", 0)
_READY = b"\x05READY" + _PROPERTIES
HANDSHAKE = GREETING + bytes([4, len(_READY)]) + _READY
RUBBISH = bytes([0, 1]) + b"\xc1"  # a frame that is no msgpack
IDLE = 10_000
STALLED = 200
BODY_BYTES = 16 << 20
PAUSE_S = 0.001


def connect(port: int, *, blocking: bool = True) -> socket.socket:
    """A connection to a port of this machine."""
    made = socket.socket()
    made.setblocking(blocking)
    if blocking:
        made.settimeout(10)
        made.connect(("127.0.0.1", port))
    else:
        made.connect_ex(("127.0.0.1", port))
    return made


def idle(ports: list[int]) -> None:
    """10,000 connections that say nothing, over all ports; those that are closed are made anew."""
    poll, held = select.poll(), {}
    for _, port in zip(range(IDLE), cycle(ports), strict=False):
        made = connect(port, blocking=False)
        held[made.fileno()] = (made, port)
        poll.register(made, select.POLLRDHUP)
    while True:
        for descriptor, _ in poll.poll(1000)[:100]:
            made, port = held.pop(descriptor)
            poll.unregister(descriptor)
            made.close()
            made = connect(port, blocking=False)
            held[made.fileno()] = (made, port)
            poll.register(made, select.POLLRDHUP)
        time.sleep(0.1)


def flood(port: int, opening: bytes, message: bytes) -> None:
    """The message as fast as kernels take it, on a new connection when one is closed; nothing is read."""
    block = message * max(1, (1 << 16) // len(message))
    while True:
        with suppress(OSError), connect(port) as made:
            made.sendall(opening)
            while True:
                made.sendall(block)


def rubbish(ports: list[int]) -> None:
    """Frames that are no messages, to a ZMQ port."""
    flood(ports[0], HANDSHAKE, RUBBISH)


def requests(ports: list[int]) -> None:
    """Requests to an HTTP port whose answers nobody reads."""
    flood(ports[0], b"", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")


def reconnects(ports: list[int]) -> None:
    """Connections to a ZMQ port that end after the handshake, as fast as they can be made."""
    while True:
        with suppress(OSError), connect(ports[0]) as made:
            made.sendall(HANDSHAKE)
            made.recv(1 << 12)


def stalled(ports: list[int]) -> None:
    """200 bodies of 16 MiB, of which half is sent, and then a byte a second."""
    held = []
    for _, port in zip(range(STALLED), cycle(ports), strict=False):
        made = connect(port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY_BYTES}\r\n\r\n"
        with suppress(OSError):
            made.settimeout(1)
            made.sendall(head.encode() + b" " * (BODY_BYTES // 2))
        held.append(made)
    while True:
        for made in held:
            with suppress(OSError):
                made.send(b" ")
        time.sleep(1)


def bodies(ports: list[int]) -> None:
    """Whole bodies of 16 MiB one after the other: a text, token ids, many prompts, deep lists, many fields."""
    big = BODY_BYTES - (1 << 10)
    makers: list[Callable[[], bytes]] = [
        lambda: json.dumps({"prompt": "word " * (big // 5)}).encode(),
        lambda: b'{"prompt":[' + b"7," * (big // 2) + b"7]}",
        lambda: b'{"prompt":[' + b'"a",' * (big // 4) + b'"a"]}',
        lambda: b'{"prompt":' + b"[" * (big // 2) + b"]" * (big // 2) + b"}",
        lambda: b"{" + b",".join(b'"%d":1' % at for at in range(big // 12)) + b"}",
        lambda: b'{"messages":[' + b'{"role":"user","content":"x"},' * (big // 31) + b"{}]}",
    ]
    made = [make() for make in makers]
    for number in count():
        body = made[number % len(made)]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        with suppress(OSError), connect(ports[0]) as one:
            one.settimeout(60)
            one.sendall(head.encode() + body)
            one.recv(1 << 12)
        time.sleep(PAUSE_S)


KINDS: dict[str, Callable[[list[int]], None]] = {
    attack.__name__: attack for attack in (idle, rubbish, requests, reconnects, stalled, bodies)
}


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    KINDS[sys.argv[1]]([int(port) for port in sys.argv[2:]])
