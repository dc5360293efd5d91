"""GB/s of KV from one process's pool into another's, each backend beside its limit: python -m benchmarks.transfer.

    shm   beside copying the same pages within one process
    zmq   beside bare ZMQ: the same frames between two processes, taken in and copied in the same way
    zmq, CURVE   the same, encrypted
    each  beside itself, while another peer of the same sender has stopped to take anything in

The sending stage runs in a child process, so both sides have an interpreter of their own, as in a deployment. What is
measured is everything between two pools: headers, checksums, sockets, writes, acknowledgements. The ways take turns.
"""

import argparse
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
from benchmarks.bare_zmq import send as send_bare
from benchmarks.report import console, print_table
from core.arrays import pack
from core.backends import SHM, ZMQ, PoolMemory
from core.clock import SystemClock
from core.codec import Codec
from core.config import TransferConfig
from core.geometry import Geometry
from core.orders import AdmitPeer, Arrived, Dial, Expect, FetchFailed, Send
from core.request import FirstToken
from server.keys import write_pair
from transfer.arrays import ArrayPageStore
from transfer.backends.shm import SharedPool, ShmReach
from transfer.keys import SECRET_SUFFIX, read_public
from transfer.messages import AnswerMessage, Attach
from transfer.receiver import Receiver
from transfer.sender import Sender
from transfer.sockets import Context

SESSION = "benchmark-session"
NAME = "benchmark"  # of the key pair
CURVE = "zmq, CURVE"
SESSION, STALLED = "benchmark-session", "the-session-of-a-stalled-peer"
GEOMETRY = Geometry("bfloat16", layers=30, kv_heads=3, head_dim=64, page_size=16)  # SmolLM2-135M: 360 KiB a page
CLOCK = SystemClock()


class Job(msgspec.Struct, frozen=True):
    """What a child is to send, on every line of its standard input. keys: folder with the one pair that both sides
    have, "" for connections in the clear. stalled: another peer is there that takes nothing in, with this pool, and all
    pages are to go to it, too."""

    way: str
    pages: int
    chunk_pages: int
    checksum: bool
    memory: PoolMemory = PoolMemory()
    keys: str = ""
    stalled: PoolMemory | None = None

    def config(self) -> TransferConfig:
        plain = TransferConfig(checksum=self.checksum)
        secret = str(Path(self.keys, f"{NAME}{SECRET_SUFFIX}"))
        return msgspec.structs.replace(plain, curve_key=secret, curve_allowed=self.keys) if self.keys else plain


class Way(Protocol):
    """Something that moves all pages once."""

    def move(self) -> None: ...

    def close(self) -> None: ...


class Copy:
    """Copying the pages within this process."""

    def __init__(self, pages: int) -> None:
        self._source = np.ones((pages, GEOMETRY.page_bytes), np.uint8)
        self._target = np.zeros_like(self._source)

    def move(self) -> None:
        for page in range(len(self._source)):
            self._target[page] = self._source[page]

    def close(self) -> None:
        """Nothing is left to do."""


class Child:
    """The sending process. port: where it listens."""

    def __init__(self, job: Job) -> None:
        command = [sys.executable, "-m", "benchmarks.transfer", "--send", msgspec.json.encode(job).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

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
        self._receiver.take_all()

    def close(self) -> None:
        self._receiver.close()
        self._child.close()


class Transfer:
    """A Receiver here and a Sender in a child."""

    def __init__(self, job: Job) -> None:
        config = job.config()
        self._pages = job.pages
        self._request = 0
        self._pool, stalled = (SharedPool(GEOMETRY, job.pages) if job.way == SHM else None for _ in range(2))
        self._pools = [pool for pool in (self._pool, stalled) if pool is not None]
        job = msgspec.structs.replace(job, memory=_memory(self._pool), stalled=job.stalled and _memory(stalled))
        self._child = Child(job)
        self._context: Context = zmq.Context()
        if job.stalled is not None:
            self._stalled = self._context.socket(zmq.DEALER)
            self._stalled.rcvhwm = 1
            self._stalled.connect(f"tcp://127.0.0.1:{self._child.port}")
            attach = Attach(session=STALLED, stage=0, checksum="xxh3_64" if job.checksum else "none")
            self._stalled.send(Codec[AnswerMessage](AnswerMessage).encode(attach))
        self._receiver = Receiver(
            config,
            stage=0,
            geometry=GEOMETRY,
            store=ArrayPageStore(GEOMETRY, job.pages, self._pool.buffer if self._pool is not None else None),
            context=self._context,
            exposures={SHM: self._pool} if self._pool is not None else {},
        )
        dial = Dial(
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
        self._request += 1
        order = Expect(
            seq=0,
            request=self._request,
            session=SESSION,
            ticket="benchmark",
            generation=self._request,
            start=0,
            count=self._pages * GEOMETRY.page_size,
            pages=pack(range(self._pages)),
            row=0,
        )
        self._receiver.apply(order, CLOCK.now())
        self._child.start()
        poller = zmq.Poller()
        for socket in self._receiver.sockets():
            poller.register(socket, zmq.POLLIN)
        while True:
            poller.poll(10)
            now = CLOCK.now()
            for event in [*self._receiver.receive(now), *self._receiver.tick(now)]:
                if isinstance(event, FetchFailed):
                    raise RuntimeError(event.message)
                if isinstance(event, Arrived):
                    return

    def close(self) -> None:
        self._receiver.close()
        self._context.destroy(linger=0)
        self._child.close()
        for pool in self._pools:
            pool.close()


def _memory(pool: SharedPool | None) -> PoolMemory:
    return PoolMemory(shm=pool.memory) if pool is not None else PoolMemory()


def measure(pages: int, chunk_pages: int, rounds: int, *, checksum: bool) -> dict[str, list[float]]:
    """GB/s of every way in every round; the ways of one round follow each other directly."""
    job = Job("", pages, chunk_pages, checksum)
    makers: dict[str, Callable[[], Way]] = {
        "copy": lambda: Copy(pages),
        SHM: lambda: Transfer(msgspec.structs.replace(job, way=SHM)),
        "bare zmq": lambda: Bare(msgspec.structs.replace(job, way="bare")),
        ZMQ: lambda: Transfer(msgspec.structs.replace(job, way=ZMQ)),
        CURVE: lambda: Transfer(msgspec.structs.replace(job, way=ZMQ, keys=folder)),
        f"{SHM} beside a stalled peer": lambda: Transfer(msgspec.structs.replace(job, way=SHM, stalled=PoolMemory())),
        f"{ZMQ} beside a stalled peer": lambda: Transfer(msgspec.structs.replace(job, way=ZMQ, stalled=PoolMemory())),
    }
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
                    speeds[name].append(pages * GEOMETRY.page_bytes / (time.perf_counter() - started) / 1e9)
    return speeds


def send(job: Job) -> None:
    """The child: send all pages once for every line on standard input, until that ends."""
    config = job.config()
    store = ArrayPageStore(GEOMETRY, job.pages)
    store.data[:] = np.random.default_rng(0).integers(0, 256, store.data.shape, np.uint8)
    if job.way == "bare":
        send_bare(store.data.reshape(job.pages, -1), job.chunk_pages, config.window_bytes)
        return
    context: Context = zmq.Context()
    sender = Sender(config, stage=0, geometry=GEOMETRY, store=store, context=context, reaches={SHM: ShmReach()})
    peers = {SESSION: job.memory} if job.stalled is None else {STALLED: job.stalled, SESSION: job.memory}
    for session, memory in peers.items():
        admit = AdmitPeer(
            seq=0,
            session=session,
            geometry=GEOMETRY,
            window_bytes=config.window_bytes,
            backend=job.way,
            memory=(memory,),
        )
        sender.apply(admit, CLOCK.now())
    print(sender.port, flush=True)
    poller = zmq.Poller()
    for socket in sender.sockets():
        poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    request = 0
    while True:
        ready = dict(poller.poll(10))
        now = CLOCK.now()
        sender.receive(now)
        sender.tick(now)
        if sys.stdin.fileno() in ready:
            if not sys.stdin.readline():
                return
            request += 1
            for session in peers:
                if session == SESSION or request == 1:
                    _order(sender, session, request, job)


def _order(sender: Sender, session: str, request: int, job: Job) -> None:
    for chunk, first in enumerate(range(0, job.pages, job.chunk_pages)):
        ids = pack(range(first, min(first + job.chunk_pages, job.pages)))
        last = first + job.chunk_pages >= job.pages
        tokens = len(ids) // 4 * GEOMETRY.page_size
        order = Send(
            after=0,
            seq=0,
            request=request if session == SESSION else -1,
            session=session,
            ticket="benchmark",
            generation=request,
            chunk=chunk,
            start=first * GEOMETRY.page_size,
            count=tokens,
            pages=ids,
            dst_pages=ids,
            row=0,
            dst_row=0,
            last=FirstToken(token=0, prompt_tokens=job.pages * GEOMETRY.page_size, cached_tokens=0) if last else None,
        )
        sender.apply(order, CLOCK.now())


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfer", description=__doc__)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--chunk-pages", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.send:
        send(msgspec.json.decode(arguments.send, type=Job))
        return 0
    rows = []
    for checksum in (False, True):
        with console.status(f"moving pages {'with' if checksum else 'without'} checksums"):
            speeds = measure(arguments.pages, arguments.chunk_pages, arguments.rounds, checksum=checksum)
        pairs = (
            (SHM, "copy"),
            (ZMQ, "bare zmq"),
            (CURVE, "bare zmq"),
            *((f"{way} beside a stalled peer", way) for way in (SHM, ZMQ)),
        )
        for name, limit in pairs:
            ratio = statistics.median(one / other for one, other in zip(speeds[name], speeds[limit], strict=True))
            medians = (f"{statistics.median(speeds[way]):.2f}" for way in (name, limit))
            rows.append((name, "yes" if checksum else "no", *medians, limit, f"{ratio:.2f}"))
    size = arguments.pages * GEOMETRY.page_bytes / 1e6
    print_table(
        f"GB/s from pool to pool, {size:.0f} MB in pages of {GEOMETRY.page_bytes >> 10} KiB: medians of "
        f"{arguments.rounds} rounds",
        ("backend", "checksums", "GB/s", "beside", "which is", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
