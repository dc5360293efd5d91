"""One end of a handoff by NIXL as a process of its own, driven by lines of JSON.

python -m tests.transfer.nixl_stage stage SETUP   a prefill stage: takes orders, says its port and its events
python -m tests.transfer.nixl_stage peer SETUP    a decode stage: the same
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from headrace.core.config import TransferConfig
from headrace.core.messages.orders import (
    AdmitPeer,
    CancelReceive,
    CancelSend,
    CloseSession,
    DropPeer,
    OpenSession,
    PrepareReceive,
    ReleaseRequest,
    SendChunk,
)
from headrace.core.messages.stage_events import (
    ChunkAcked,
    ChunkReceived,
    KvReceived,
    PeerLost,
    ReceiveCancelled,
    ReceiveFailed,
    ReceivePrepared,
    SendCancelled,
    SendFailed,
    SessionClosed,
)
from headrace.core.runtime.event_loop import EventLoop
from headrace.core.types.kv.backends import NIXL
from headrace.core.types.kv.geometry import Geometry
from tests.transfer.harness import CLOCK, Loop, random_store

Order = (
    AdmitPeer
    | DropPeer
    | SendChunk
    | CancelSend
    | ReleaseRequest
    | OpenSession
    | CloseSession
    | PrepareReceive
    | CancelReceive
)
Event = (
    ChunkAcked
    | SendCancelled
    | SendFailed
    | PeerLost
    | KvReceived
    | ChunkReceived
    | ReceivePrepared
    | ReceiveFailed
    | ReceiveCancelled
    | SessionClosed
)
E = TypeVar("E")


class Setup(msgspec.Struct, frozen=True):
    """file: what the pool is to be mapped from, for others to look at; "" for memory of the process alone."""

    geometry: Geometry
    pages: int
    config: TransferConfig = TransferConfig(backends=(NIXL,), window_bytes=1 << 30)
    file: str = ""

    def mapped(self) -> memoryview:
        return memoryview(np.memmap(self.file, np.uint8, "r+"))


class Process:
    """The other process, seen from the test."""

    def __init__(self, kind: str, setup: Setup, loop: Loop) -> None:
        command = [sys.executable, "-m", "tests.transfer.nixl_stage", kind, msgspec.json.encode(setup).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._loop = loop
        self._read = b""
        self.events: list[Any] = []
        self.hello: dict[str, Any] = json.loads(self._out.readline())

    def order(self, order: Order) -> None:
        self._in.write(msgspec.json.encode(order) + b"\n")
        self._in.flush()

    def of(self, kind: type[E]) -> list[E]:
        while select.select([self._out], [], [], 0)[0]:
            data = os.read(self._out.fileno(), 1 << 16)
            if not data:
                break
            self._read += data
        *lines, self._read = self._read.split(b"\n")
        self.events += [msgspec.json.decode(line, type=Event) for line in lines]
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[E], timeout_s: float = 10.0) -> E:
        self._loop.until(lambda: self.of(kind), timeout_s)
        return self.of(kind)[0]

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._in.close()
        self._out.close()


def main(kind: str, setup: Setup) -> None:
    from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool, NixlTransport
    from headrace.transfer.backends.strided_pool import c_order
    from headrace.transfer.data.receiver import Receiver
    from headrace.transfer.data.sender import Sender

    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # UCX writes its log to standard output
    store = random_store(setup.geometry, setup.pages, seed=1, memory=setup.mapped() if setup.file else None)
    memory = memoryview(store.memory)
    context: Any = zmq.Context()
    common: dict[str, Any] = {"stage": 0, "geometry": setup.geometry, "store": store, "context": context}
    port: Any
    hello: dict[str, Any] = {}
    if kind == "stage":
        port = Sender(setup.config, **common, transports={NIXL: NixlTransport(memory, LOOPBACK)})
        hello = {"port": port.port}
    else:
        registered = NixlRegisteredPool(c_order(setup.geometry, setup.pages), memory, LOOPBACK)
        port = Receiver(setup.config, **common, registered_pools={NIXL: registered})
        hello = {"memory": msgspec.to_builtins(registered.memory)}
    print(json.dumps(hello), file=said, flush=True)
    serve(port, lambda event: print(msgspec.json.encode(event).decode(), file=said, flush=True))


def serve(port: Any, tell: Callable[[Any], None]) -> None:
    """Until standard input ends."""
    decoder = msgspec.json.Decoder(Order)
    given = b""
    loop = EventLoop((port,), zmq.Poller, CLOCK)
    while True:
        readable = loop.wait([sys.stdin.fileno()])
        events = [event for _, found in loop.events() for event in found]
        if sys.stdin.fileno() in readable:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                return
            *lines, given = (given + data).split(b"\n")
            for line in lines:
                events += port.apply(decoder.decode(line), CLOCK.now())
        for event in events:
            tell(event)


if __name__ == "__main__":
    main(sys.argv[1], msgspec.json.decode(sys.argv[2], type=Setup))
