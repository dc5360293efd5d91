"""GB/s of KV from one process's pool into another's, each backend beside its limit: python -m benchmarks.transfer.

    shm   beside copying the same pages within one process
    zmq   beside bare ZMQ: the same frames between two processes, taken in and copied in the same way
    zmq, CURVE   the same, encrypted
    nixl  beside bare NIXL: the same pages between two processes (where the package is installed: make bench-nixl)
    each  beside itself, while another peer of the same sender has stopped to take anything in

The sending stage runs in a child process, so both sides have an interpreter of their own, as in a deployment. What is
measured is everything between two pools: headers, checksums, sockets, writes, acknowledgements. The ways take turns.
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import zmq

from benchmarks.bare_zmq import BareReceiver
from benchmarks.report import console, print_table, run
from benchmarks.sending import BARE_NIXL, BARE_ZMQ, CLOCK, GEOMETRY, NAME, REPEATS, SESSION, STALLED, Job
from headrace.core.messages.orders import OpenSession, PrepareReceive
from headrace.core.messages.stage_events import KvReceived, ReceiveFailed
from headrace.core.runtime.codec import Codec
from headrace.core.types.backends import NIXL, SHM, ZMQ, PoolMemory
from headrace.core.types.packed import pack
from headrace.server.config.curve_keys import write_pair
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.backends.shm import SharedPool
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.messages import AnswerMessage, Attach
from headrace.transfer.sockets.curve_keys import read_public
from headrace.transfer.sockets.zmq_sockets import Context

CURVE = "zmq, CURVE"


class Way(Protocol):
    """Something that moves all pages, REPEATS times."""

    def move(self) -> None: ...

    def close(self) -> None: ...


class Copy:
    """Copying the pages within this process."""

    def __init__(self, pages: int) -> None:
        self._source = np.ones((pages, GEOMETRY.page_bytes), np.uint8)
        self._target = np.zeros_like(self._source)

    def move(self) -> None:
        for page in list(range(len(self._source))) * REPEATS:
            self._target[page] = self._source[page]

    def close(self) -> None:
        """Nothing is left to do."""


class Child:
    """The sending process. port: where it listens."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "benchmarks.sending", msgspec.json.encode(job).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def wait(self) -> None:
        """Until it has said another line."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def start(self) -> None:
        """Have it send."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Bare:
    """What ZMQ alone does with the same frames."""

    def __init__(self, job: Job) -> None:
        self._child = Child(job)
        store = ArrayPageStore(GEOMETRY, job.pages)
        self._receiver = BareReceiver(self._child.port, store.data.reshape(job.pages, -1))

    def move(self) -> None:
        self._child.start()
        for _ in range(REPEATS):
            self._receiver.take_all()

    def close(self) -> None:
        self._receiver.close()
        self._child.close()


class BareNixl:
    """What NIXL alone does with the same pages."""

    def __init__(self, job: Job) -> None:
        from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool

        store = ArrayPageStore(GEOMETRY, job.pages)
        self._exposure = NixlRegisteredPool(GEOMETRY, job.pages, store.data.reshape(-1).data, LOOPBACK)
        self._child = Child(msgspec.structs.replace(job, access=self._exposure.grant(SESSION)))

    def move(self) -> None:
        self._child.start()
        self._child.wait()

    def close(self) -> None:
        self._child.close()
        self._exposure.close()


class Transfer:
    """A Receiver here and a Sender in a child."""

    def __init__(self, job: Job) -> None:
        config = job.config()
        self._pages = job.pages
        self._request = 0
        self._pool, stalled = (SharedPool(GEOMETRY, job.pages) if job.way == SHM else None for _ in range(2))
        self._pools = [pool for pool in (self._pool, stalled) if pool is not None]
        store = ArrayPageStore(GEOMETRY, job.pages, self._pool.buffer if self._pool is not None else None)
        exposures: dict[str, RegisteredPool] = {} if self._pool is None else {SHM: self._pool}
        memory = _memory(self._pool)
        if job.way == NIXL:
            from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool

            exposure = NixlRegisteredPool(GEOMETRY, job.pages, store.data.reshape(-1).data, LOOPBACK)
            exposures, memory = {NIXL: exposure}, PoolMemory(nixl=exposure.memory)
        job = msgspec.structs.replace(job, memory=memory, stalled=job.stalled and _memory(stalled))
        self._child = Child(job)
        self._context: Context = zmq.Context()
        if job.stalled is not None:
            self._stalled = self._context.socket(zmq.DEALER)
            self._stalled.rcvhwm = 1
            self._stalled.connect(f"tcp://127.0.0.1:{self._child.port}")
            kind = "xxh3_64" if job.checksum else "none"
            attach = Attach(session=STALLED, stage=0, checksum=kind, checksum_shm=job.checksum)
            self._stalled.send(Codec[AnswerMessage](AnswerMessage).encode(attach))
        self._receiver = Receiver(
            config,
            stage=0,
            geometry=GEOMETRY,
            store=store,
            context=self._context,
            exposures=exposures,
        )
        dial = OpenSession(
            seq=0,
            session=SESSION,
            endpoints=(f"tcp://127.0.0.1:{self._child.port}",),
            geometries=(GEOMETRY,),
            window_bytes=config.window_bytes,
            backend=job.way,
            server_key=read_public(Path(config.curve_key)) if config.curve_key else "",
        )
        self._receiver.apply(dial, CLOCK.now())

    def move(self) -> None:
        for _ in range(REPEATS):
            self._request += 1
            self._expect(self._request)
        self._child.start()
        poller = zmq.Poller()
        for socket in self._receiver.sockets():
            poller.register(socket, zmq.POLLIN)
        arrived = 0
        while arrived < REPEATS:
            poller.poll(10)
            now = CLOCK.now()
            for event in [*self._receiver.receive(now), *self._receiver.tick(now)]:
                if isinstance(event, ReceiveFailed):
                    raise RuntimeError(event.message)
                arrived += isinstance(event, KvReceived)

    def _expect(self, request: int) -> None:
        order = PrepareReceive(
            seq=0,
            request=request,
            session=SESSION,
            ticket="benchmark",
            generation=request,
            start=0,
            count=self._pages * GEOMETRY.page_size,
            pages=pack(range(self._pages)),
            row=request % REPEATS,
        )
        self._receiver.apply(order, CLOCK.now())

    def close(self) -> None:
        self._receiver.close()
        self._context.destroy(linger=0)
        self._child.close()
        for pool in self._pools:
            pool.close()


def nixl_is_there() -> bool:
    return importlib.util.find_spec("nixl") is not None


def _memory(pool: SharedPool | None) -> PoolMemory:
    return PoolMemory(shm=pool.memory) if pool is not None else PoolMemory()


def measure(pages: int, chunk_pages: int, rounds: int, *, checksum: bool) -> dict[str, list[float]]:
    """GB/s of every way in every round; the ways of one round follow each other directly."""
    job = Job("", pages, chunk_pages, checksum)
    makers: dict[str, Callable[[], Way]] = {
        "copy": lambda: Copy(pages),
        SHM: lambda: Transfer(msgspec.structs.replace(job, way=SHM)),
        BARE_ZMQ: lambda: Bare(msgspec.structs.replace(job, way=BARE_ZMQ)),
        ZMQ: lambda: Transfer(msgspec.structs.replace(job, way=ZMQ)),
        CURVE: lambda: Transfer(msgspec.structs.replace(job, way=ZMQ, keys=folder)),
        f"{SHM} beside a stalled peer": lambda: Transfer(msgspec.structs.replace(job, way=SHM, stalled=PoolMemory())),
        f"{ZMQ} beside a stalled peer": lambda: Transfer(msgspec.structs.replace(job, way=ZMQ, stalled=PoolMemory())),
    }
    if nixl_is_there():
        makers[BARE_NIXL] = lambda: BareNixl(msgspec.structs.replace(job, way=BARE_NIXL))
        makers[NIXL] = lambda: Transfer(msgspec.structs.replace(job, way=NIXL))
    speeds: dict[str, list[float]] = {name: [] for name in makers}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_pair(Path(folder), NAME)
        ways = {name: make() for name, make in makers.items()}
        for way in ways.values():
            stack.callback(way.close)
        for number in range(rounds + 2):
            for name, way in ways.items():
                started = time.perf_counter()
                way.move()
                if number > 1:  # memory is touched for the first time in the first rounds
                    speeds[name].append(REPEATS * pages * GEOMETRY.page_bytes / (time.perf_counter() - started) / 1e9)
    return speeds


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--chunk-pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(given)
    rows = []
    for checksum in (False, True):
        with console.status(f"moving pages {'with' if checksum else 'without'} checksums"):
            speeds = measure(arguments.pages, arguments.chunk_pages, arguments.rounds, checksum=checksum)
        pairs = (
            (SHM, "copy"),
            (ZMQ, BARE_ZMQ),
            (CURVE, BARE_ZMQ),
            *([(NIXL, BARE_NIXL)] if nixl_is_there() else []),
            *((f"{way} beside a stalled peer", way) for way in (SHM, ZMQ)),
        )
        for name, limit in pairs:
            ratio = statistics.median(one / other for one, other in zip(speeds[name], speeds[limit], strict=True))
            medians = (f"{statistics.median(speeds[way]):.2f}" for way in (name, limit))
            rows.append((name, "yes" if checksum else "no", *medians, limit, f"{ratio:.2f}"))
    size = arguments.pages * GEOMETRY.page_bytes / 1e6
    print_table(
        f"GB/s from pool to pool, {REPEATS} times {size:.0f} MB in pages of {GEOMETRY.page_bytes >> 10} KiB: "
        f"medians of {arguments.rounds} rounds",
        ("backend", "checksums", "GB/s", "beside", "which is", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
