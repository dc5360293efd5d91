"""GB/s of KV from one pool into another process's over ZMQ, beside a memory copy: python -m benchmarks.transfer.

The sending stage runs in a child process, so both sides have an interpreter of their own, as in a deployment. What is
measured is everything between two pools: chunk headers, checksums, sockets, writes and acknowledgements. --curve
encrypts the connection.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from core.arrays import pack
from core.clock import SystemClock
from core.config import TransferConfig
from core.geometry import Geometry
from core.orders import AdmitPeer, Arrived, Dial, Expect, FetchFailed, Send
from core.request import FirstToken
from server.keys import write_pair
from transfer.arrays import ArrayPageStore
from transfer.keys import read_public
from transfer.receiver import Receiver
from transfer.sender import Sender
from transfer.sockets import Context

SESSION = "benchmark-session"
NAME = "benchmark"
GEOMETRY = Geometry("bfloat16", layers=30, kv_heads=3, head_dim=64, page_size=16)  # SmolLM2-135M: 360 KiB a page
CLOCK = SystemClock()


def measure(
    pages: int = 256, chunk_pages: int = 32, rounds: int = 8, *, checksum: bool = True, curve: bool = False
) -> tuple[float, float]:
    """Return (transfer, memory copy) in GB/s: the best of several rounds of moving this many pages."""
    with tempfile.TemporaryDirectory() as folder:
        if curve:
            write_pair(Path(folder), NAME)
        return _measure(Path(folder) if curve else None, pages, chunk_pages, rounds, checksum=checksum)


def _measure(keys: Path | None, pages: int, chunk_pages: int, rounds: int, *, checksum: bool) -> tuple[float, float]:
    config = _config(keys, checksum=checksum)
    command = [sys.executable, "-m", "benchmarks.transfer", "--send", f"{pages},{chunk_pages}"]
    flags = [*([] if checksum else ["--no-checksum"]), *(["--keys", str(keys)] if keys else [])]
    child = subprocess.Popen([*command, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    context = zmq.Context()
    store = ArrayPageStore(GEOMETRY, pages)
    receiver = Receiver(config, stage=0, geometry=GEOMETRY, store=store, context=context)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        endpoint = f"tcp://127.0.0.1:{int(child.stdout.readline())}"
        dial = Dial(
            seq=0,
            session=SESSION,
            endpoints=(endpoint,),
            geometries=(GEOMETRY,),
            window_bytes=config.window_bytes,
            server_key=read_public(Path(config.curve_key)) if config.curve_key else "",
        )
        receiver.apply(dial, CLOCK.now())
        seconds = []
        for request in range(rounds + 1):
            _expect(receiver, request, pages)
            started = time.perf_counter()
            child.stdin.write("\n")
            child.stdin.flush()
            _turn_until_arrived(receiver)
            seconds.append(time.perf_counter() - started)
        total = pages * GEOMETRY.page_bytes
        return total / min(seconds[1:]) / 1e9, memory_copy(total)
    finally:
        receiver.close()
        context.destroy(linger=0)
        child.kill()
        child.communicate()


def memory_copy(size: int, rounds: int = 5) -> float:
    """GB/s of numpy copying this many bytes."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return size / best / 1e9


def _expect(receiver: Receiver, request: int, pages: int) -> None:
    order = Expect(
        seq=0,
        request=request,
        session=SESSION,
        ticket="benchmark",
        generation=request,
        start=0,
        count=pages * GEOMETRY.page_size,
        pages=pack(range(pages)),
        row=0,
    )
    receiver.apply(order, CLOCK.now())


def _turn_until_arrived(receiver: Receiver) -> None:
    poller = zmq.Poller()
    for socket in receiver.sockets():
        poller.register(socket, zmq.POLLIN)
    while True:
        poller.poll(10)
        now = CLOCK.now()
        for event in [*receiver.receive(now), *receiver.tick(now)]:
            if isinstance(event, FetchFailed):
                raise RuntimeError(event.message)
            if isinstance(event, Arrived):
                return


def _config(keys: Path | None, *, checksum: bool) -> TransferConfig:
    """keys: folder with the one pair that both sides have."""
    if keys is None:
        return TransferConfig(checksum=checksum)
    return TransferConfig(checksum=checksum, curve_key=str(keys / f"{NAME}.key_secret"), curve_allowed=str(keys))


def send(keys: Path | None, pages: int, chunk_pages: int, *, checksum: bool) -> None:
    """The child: send all pages once for every line on standard input, until that ends."""
    config = _config(keys, checksum=checksum)
    store = ArrayPageStore(GEOMETRY, pages)
    store.data[:] = np.random.default_rng(0).integers(0, 256, store.data.shape, np.uint8)
    context: Context = zmq.Context()
    sender = Sender(config, stage=0, geometry=GEOMETRY, store=store, context=context)
    sender.apply(AdmitPeer(seq=0, session=SESSION, geometry=GEOMETRY, window_bytes=config.window_bytes), CLOCK.now())
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
            _order(sender, request, pages, chunk_pages)
            request += 1


def _order(sender: Sender, request: int, pages: int, chunk_pages: int) -> None:
    for chunk, first in enumerate(range(0, pages, chunk_pages)):
        ids = pack(range(first, min(first + chunk_pages, pages)))
        last = first + chunk_pages >= pages
        tokens = len(ids) // 4 * GEOMETRY.page_size
        order = Send(
            after=0,
            seq=0,
            request=request,
            session=SESSION,
            ticket="benchmark",
            generation=request,
            chunk=chunk,
            start=first * GEOMETRY.page_size,
            count=tokens,
            pages=ids,
            dst_pages=ids,
            row=0,
            dst_row=0,
            last=FirstToken(token=0, prompt_tokens=pages * GEOMETRY.page_size, cached_tokens=0) if last else None,
        )
        sender.apply(order, CLOCK.now())


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="KV transfer between two processes beside a memory copy")
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--no-checksum", action="store_true")
    parser.add_argument("--curve", action="store_true", help="encrypt, with CURVE")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.send:
        pages, chunk_pages = map(int, arguments.send.split(","))
        send(arguments.keys, pages, chunk_pages, checksum=not arguments.no_checksum)
        return 0
    moved, copied = measure(arguments.pages, checksum=not arguments.no_checksum, curve=arguments.curve)
    print(f"zmq transfer  {moved:6.2f} GB/s\nmemory copy   {copied:6.2f} GB/s\nratio         {moved / copied:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
