"""KV transfer in GB/s from one process's pool into another's, each backend beside its limit.

`python -m benchmarks.transfer` compares:

    shm          with copying the same pages within one process
    zmq          with bare ZMQ: the same frames between two processes, received and copied in the same way
    zmq, CURVE   with bare ZMQ: the cost of encryption
    nixl         with bare NIXL: the same pages between two processes (where it is installed: make bench-nixl)
    shm, zmq     with themselves, while another peer of the same sender receives nothing

The sending stage runs in a child process, so that both sides have their own interpreter, as in a deployment. Everything
between two pools is measured: headers, checksums, sockets, writes, acknowledgements. The transports alternate.
"""

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

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.bare_zmq import BareReceiver
from benchmarks.report import console, print_table, run
from benchmarks.sending import BARE_NIXL, BARE_ZMQ, CLOCK, GEOMETRY, NAME, REPEATS, SESSION, STALLED, Job
from headrace.core.messages.orders import OpenSession, PrepareReceive
from headrace.core.messages.stage_events import KvReceived, ReceiveFailed
from headrace.core.runtime.codec import Codec
from headrace.core.types.kv.backends import NIXL, SHM, ZMQ, PoolMemory
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PrefillTerms
from headrace.server.config.curve_keys import write_pair
from headrace.transfer.backends.base import RegisteredPool
from headrace.transfer.backends.shm import SharedPool
from headrace.transfer.backends.strided_pool import ArrayPageStore, c_order
from headrace.transfer.data.receiver import Receiver
from headrace.transfer.protocol.messages import AnswerMessage, Attach
from headrace.transfer.sockets.curve_keys import read_public
from headrace.transfer.sockets.zmq_sockets import Context

CURVE = "zmq, CURVE"


class Mover(Protocol):
    """A transport under test, or a limit."""

    def move(self) -> None:
        """Move all pages REPEATS times."""
        ...

    def close(self) -> None:
        """End its processes and connections."""
        ...


class MemoryCopy:
    """Limit of shm: copies the pages within this process."""

    def __init__(self, pages: int) -> None:
        """Allocate source and target."""
        self._source = np.ones((pages, GEOMETRY.page_bytes), np.uint8)
        self._target = np.zeros_like(self._source)

    def move(self) -> None:
        """See Mover."""
        for page in list(range(len(self._source))) * REPEATS:
            self._target[page] = self._source[page]

    def close(self) -> None:
        """Does nothing."""


class SendingProcess:
    """The child process that sends (benchmarks/sending.py)."""

    def __init__(self, job: Job) -> None:
        """Start it and read the port where it listens."""
        command = [sys.executable, "-m", "benchmarks.sending", msgspec.json.encode(job).decode()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def wait(self) -> None:
        """Wait for its next line."""
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def start(self) -> None:
        """Have it send all pages REPEATS times."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


class BareZmq:
    """Limit of zmq: ZMQ alone with the same frames."""

    def __init__(self, job: Job) -> None:
        """Start the sender and connect to it."""
        self._child = SendingProcess(job)
        store = ArrayPageStore(GEOMETRY, job.pages)
        self._receiver = BareReceiver(self._child.port, store.data.reshape(job.pages, -1))

    def move(self) -> None:
        """See Mover."""
        self._child.start()
        for _ in range(REPEATS):
            self._receiver.take_all()

    def close(self) -> None:
        """See Mover."""
        self._receiver.close()
        self._child.close()


class BareNixl:
    """Limit of nixl: NIXL alone with the same pages."""

    def __init__(self, job: Job) -> None:
        """Register the pool and start the sender."""
        from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool

        store = ArrayPageStore(GEOMETRY, job.pages)
        self._registered = NixlRegisteredPool(c_order(GEOMETRY, job.pages), store.data.reshape(-1).data, LOOPBACK)
        self._child = SendingProcess(msgspec.structs.replace(job, access=self._registered.grant(SESSION)))

    def move(self) -> None:
        """See Mover."""
        self._child.start()
        self._child.wait()

    def close(self) -> None:
        """See Mover."""
        self._child.close()
        self._registered.close()


class Transfer:
    """A backend: a Receiver in this process and a Sender in a child process."""

    def __init__(self, job: Job) -> None:
        """Make the pool, start the sender, open the session."""
        config = job.config()
        self._pages = job.pages
        self._request = 0
        self._pool, stalled = (
            SharedPool(c_order(GEOMETRY, job.pages)) if job.transport == SHM else None for _ in range(2)
        )
        self._pools = [pool for pool in (self._pool, stalled) if pool is not None]
        store = ArrayPageStore(GEOMETRY, job.pages, self._pool.buffer if self._pool is not None else None)
        registered: dict[str, RegisteredPool] = {} if self._pool is None else {SHM: self._pool}
        memory = _memory(self._pool)
        if job.transport == NIXL:
            from headrace.transfer.backends.nixl import LOOPBACK, NixlRegisteredPool

            pool = NixlRegisteredPool(c_order(GEOMETRY, job.pages), store.data.reshape(-1).data, LOOPBACK)
            registered, memory = {NIXL: pool}, PoolMemory(nixl=pool.memory)
        job = msgspec.structs.replace(job, memory=memory, stalled=job.stalled and _memory(stalled))
        self._child = SendingProcess(job)
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
            registered_pools=registered,
        )
        order = OpenSession(
            seq=0,
            terms=PrefillTerms(
                session=SESSION,
                endpoints=(f"tcp://127.0.0.1:{self._child.port}",),
                geometries=(GEOMETRY,),
                window_bytes=config.window_bytes,
                backend=job.transport,
                server_key=read_public(Path(config.curve_key)) if config.curve_key else "",
            ),
        )
        self._receiver.apply(order, CLOCK.now())

    def move(self) -> None:
        """See Mover. Raises AssertionError when a request fails."""
        for _ in range(REPEATS):
            self._request += 1
            self._prepare(self._request)
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

    def _prepare(self, request: int) -> None:
        """Order the receiver to receive all pages."""
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
        """See Mover."""
        self._receiver.close()
        self._context.destroy(linger=0)
        self._child.close()
        for pool in self._pools:
            pool.close()


def has_nixl() -> bool:
    """Whether the nixl package is installed."""
    return importlib.util.find_spec("nixl") is not None


def _memory(pool: SharedPool | None) -> PoolMemory:
    return PoolMemory(shm=pool.memory) if pool is not None else PoolMemory()


def measure(pages: int, chunk_pages: int, rounds: int, *, checksum: bool) -> dict[str, list[float]]:
    """GB/s of every transport in every round; those of one round follow each other directly."""
    job = Job("", pages, chunk_pages, checksum)
    makers: dict[str, Callable[[], Mover]] = {
        "copy": lambda: MemoryCopy(pages),
        SHM: lambda: Transfer(msgspec.structs.replace(job, transport=SHM)),
        BARE_ZMQ: lambda: BareZmq(msgspec.structs.replace(job, transport=BARE_ZMQ)),
        ZMQ: lambda: Transfer(msgspec.structs.replace(job, transport=ZMQ)),
        CURVE: lambda: Transfer(msgspec.structs.replace(job, transport=ZMQ, keys=folder)),
        f"{SHM} beside a stalled peer": lambda: Transfer(
            msgspec.structs.replace(job, transport=SHM, stalled=PoolMemory())
        ),
        f"{ZMQ} beside a stalled peer": lambda: Transfer(
            msgspec.structs.replace(job, transport=ZMQ, stalled=PoolMemory())
        ),
    }
    if has_nixl():
        makers[BARE_NIXL] = lambda: BareNixl(msgspec.structs.replace(job, transport=BARE_NIXL))
        makers[NIXL] = lambda: Transfer(msgspec.structs.replace(job, transport=NIXL))
    speeds: dict[str, list[float]] = {name: [] for name in makers}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_pair(Path(folder), NAME)
        movers = {name: make() for name, make in makers.items()}
        for mover in movers.values():
            stack.callback(mover.close)
        for number in range(rounds + 2):
            for name, mover in movers.items():
                started = time.perf_counter()
                mover.move()
                if number > 1:  # the first rounds touch memory for the first time
                    speeds[name].append(REPEATS * pages * GEOMETRY.page_bytes / (time.perf_counter() - started) / 1e9)
    return speeds


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = make_parser("transfer", __doc__)
    parser.add_argument("--pages", type=int, default=256, metavar="N", help="pages of a request")
    parser.add_argument("--chunk-pages", type=int, default=32, metavar="N", help="pages of a chunk")
    add_rounds(parser, 9)
    given = parser.parse_args(arguments)
    rows = []
    for checksum in (False, True):
        with console.status(f"moving pages {'with' if checksum else 'without'} checksums"):
            speeds = measure(given.pages, given.chunk_pages, given.rounds, checksum=checksum)
        pairs = (
            (SHM, "copy"),
            (ZMQ, BARE_ZMQ),
            (CURVE, BARE_ZMQ),
            *([(NIXL, BARE_NIXL)] if has_nixl() else []),
            *((f"{backend} beside a stalled peer", backend) for backend in (SHM, ZMQ)),
        )
        for name, limit in pairs:
            ratio = statistics.median(one / other for one, other in zip(speeds[name], speeds[limit], strict=True))
            medians = (f"{statistics.median(speeds[each]):.2f}" for each in (name, limit))
            rows.append((name, "yes" if checksum else "no", *medians, limit, f"{ratio:.2f}"))
    size = given.pages * GEOMETRY.page_bytes / 1e6
    print_table(
        f"GB/s from pool to pool, {REPEATS} times {size:.0f} MB in pages of {GEOMETRY.page_bytes >> 10} KiB: "
        f"medians of {given.rounds} rounds",
        ("backend", "checksums", "GB/s", "beside", "which is", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
