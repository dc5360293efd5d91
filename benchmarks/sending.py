"""The sending process of benchmarks.transfer: `python -m benchmarks.sending JOB`, a Job as JSON."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import zmq

from benchmarks.bare_zmq import send as send_bare_zmq
from headrace.core.config import TransferConfig
from headrace.core.messages.orders import AdmitPeer, SendChunk
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.event_loop import EventLoop
from headrace.core.types.kv.backends import NIXL, SHM, NixlAccess, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import FirstToken
from headrace.transfer.backends.base import Transport
from headrace.transfer.backends.shm import ShmTransport
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.data.sender import Sender
from headrace.transfer.sockets.curve_keys import SECRET_SUFFIX
from headrace.transfer.sockets.zmq_sockets import Context

SESSION, STALLED = "benchmark-session", "the-session-of-a-stalled-peer"
NAME = "benchmark"  # of the CURVE key pair
BARE_ZMQ, BARE_NIXL = "bare zmq", "bare nixl"
REPEATS = 4  # requests per measurement, without a pause
GEOMETRY = Geometry("bfloat16", layers=30, kv_heads=3, head_dim=64, page_size=16)  # SmolLM2-135M: 360 KiB a page
CLOCK = SystemClock()


class Job(msgspec.Struct, frozen=True):
    """What to send, REPEATS times for every line on standard input."""

    transport: str
    """A backend, or BARE_ZMQ or BARE_NIXL."""
    pages: int
    chunk_pages: int
    checksum: bool
    memory: PoolMemory = PoolMemory()
    """The receiving pool, for backends that write into it."""
    keys: str = ""
    """Folder with the CURVE key pair that both sides use; "" connects in the clear."""
    stalled: PoolMemory | None = None
    """Pool of a second peer that receives nothing; all pages are queued for it as well. None: no such peer."""
    access: NixlAccess | None = None
    """For BARE_NIXL."""

    def config(self) -> TransferConfig:
        """Transfer settings of both sides."""
        plain = TransferConfig(backends=(SHM, NIXL, "zmq"), checksum=self.checksum, checksum_shm=self.checksum)
        secret = str(Path(self.keys, f"{NAME}{SECRET_SUFFIX}"))
        return msgspec.structs.replace(plain, curve_key=secret, curve_allowed=self.keys) if self.keys else plain


def send(job: Job) -> None:
    """Print the data port; then send all pages for every line on standard input, until it ends."""
    config = job.config()
    store = ArrayPageStore(GEOMETRY, job.pages)
    store.data[:] = np.random.default_rng(0).integers(0, 256, store.data.shape, np.uint8)
    if job.transport == BARE_ZMQ:
        send_bare_zmq(store.data.reshape(job.pages, -1), job.chunk_pages, config.window_bytes, REPEATS)
        return
    memory = store.data.reshape(-1).data
    if job.transport == BARE_NIXL:
        from benchmarks.bare_nixl import send as send_bare_nixl

        assert job.access is not None
        send_bare_nixl(memory, job.access, GEOMETRY.page_bytes, job.chunk_pages, config.window_bytes, REPEATS)
        return
    transports: dict[str, Transport] = {SHM: ShmTransport()}
    if job.transport == NIXL:
        from headrace.transfer.backends.nixl import LOOPBACK, NixlTransport

        transports[NIXL] = NixlTransport(memory, LOOPBACK)
    context: Context = zmq.Context()
    sender = Sender(config, stage=0, geometry=GEOMETRY, store=store, context=context, transports=transports)
    peers = {SESSION: job.memory} if job.stalled is None else {STALLED: job.stalled, SESSION: job.memory}
    for session, pool in peers.items():
        admit = AdmitPeer(
            seq=0,
            terms=PeerTerms(
                session=session,
                geometries=(GEOMETRY,),
                window_bytes=config.window_bytes,
                backend=job.transport,
                memory=(pool,),
            ),
        )
        sender.apply(admit, CLOCK.now())
    print(sender.port, flush=True)
    _serve(sender, tuple(peers), job)


def _serve(sender: Sender, sessions: tuple[str, ...], job: Job) -> None:
    """The I/O loop, as in a stage."""
    loop = EventLoop((sender,), zmq.Poller, CLOCK)
    request = 0
    while True:
        readable = loop.wait([sys.stdin.fileno()])
        for _ in loop.events():
            pass  # acknowledgements
        if sys.stdin.fileno() in readable:
            if not sys.stdin.readline():
                return
            for _ in range(REPEATS):
                request += 1
                for session in sessions:
                    if session == SESSION or request == 1:
                        _order(sender, session, request, job)


def _order(sender: Sender, session: str, request: int, job: Job) -> None:
    """Send all pages as one request."""
    for chunk, first in enumerate(range(0, job.pages, job.chunk_pages)):
        ids = pack(range(first, min(first + job.chunk_pages, job.pages)))
        last = first + job.chunk_pages >= job.pages
        tokens = len(ids) // 4 * GEOMETRY.page_size
        order = SendChunk(
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
            dst_row=request % REPEATS,
            last=FirstToken(token=0, prompt_tokens=job.pages * GEOMETRY.page_size, cached_tokens=0) if last else None,
        )
        sender.apply(order, CLOCK.now())


if __name__ == "__main__":
    send(msgspec.json.decode(sys.argv[1], type=Job))
