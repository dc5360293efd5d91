"""Host and disk tiers: GB/s of storing and loading KV pages, and loading a prompt's prefix beside computing it.

`python -m benchmarks.tiers`. One thread copies, as the copy thread of a stage does, checksums included. Times to the
first token end with the last page of the prompt, which is computed in any case. "cold" is read from the device: the
system's cache of the files is emptied before.
"""

import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from benchmarks.arguments import add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import LoadPages, PlanRow, StorePages
from headrace.core.messages.stage_events import PagesLoaded, PagesStored
from headrace.core.types import packed
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import DISK, HOST, PageHeader, Tier
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.kv.tiers.copier import Copier, CopyEvent, CopyOrder
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import pool_pages
from headrace.engine.kv.tiers.record import HEADER_BYTES, Origin
from headrace.engine.load_plan import plan_rank
from headrace.engine.runner import ModelRunner
from headrace.server.config.load import find_cpuinfo

GREEDY = SamplingParams(temperature=0.0)


class Prompt(NamedTuple):
    """A prompt, whose pages are the first ones of the pool."""

    tokens: list[int]
    chunk: int
    page_size: int
    prefix_pages: int
    """The last page of the prompt follows them."""

    def compute(self, runner: ModelRunner) -> float:
        """Compute all of it. Returns the seconds."""
        started = time.perf_counter()
        for start in range(0, len(self.tokens), self.chunk):
            self._run(runner, start, min(start + self.chunk, len(self.tokens)))
        return time.perf_counter() - started

    def finish(self, runner: ModelRunner) -> int:
        """Compute the last page, with the prefix in the pool. Returns the first token."""
        return self._run(runner, self.prefix_pages * self.page_size, len(self.tokens))

    def _run(self, runner: ModelRunner, start: int, end: int) -> int:
        pages = packed.pack(range(-(-end // self.page_size)))
        row = PlanRow(1, start, end - start, pages, packed.pack(self.tokens[start:end]), sample=GREEDY)
        return runner.execute([row]).samples[0].token


class Tiers:
    """The copy thread over a runner's pool, asked one order after the other."""

    def __init__(self, runner: ModelRunner, count: int, folder: str) -> None:
        """count: pages that each order copies."""
        self._events: queue.Queue[CopyEvent] = queue.Queue()
        budget = 2 * count * (HEADER_BYTES + runner.geometry.page_bytes) + (1 << 30)
        self._endless: StorePages | None = None  # given again when it is answered
        self._folder = Path(folder)
        self._all = packed.pack(range(count))
        digest = sha256(b"").digest()
        self._headers = (PageHeader(digest, digest, digest, 0),) * count
        self.copier = Copier(
            0,
            pool_pages(runner.pool),
            host=HostStore(count, runner.geometry.page_bytes),
            disk=DiskStore(folder, Origin(runner.fingerprint, runner.geometry), budget),
            report=self._answered,
        )
        self.copier.start()

    def store(self, tier: Tier) -> float:
        """Seconds to store all pages."""
        headers = self._headers if tier == DISK else ()
        return self._ask(StorePages(seq=1, tier=tier, sources=self._all, slots=self._all, headers=headers))

    def load(self, tier: Tier) -> float:
        """Seconds to load all pages."""
        return self._ask(LoadPages(seq=1, tier=tier, slots=self._all, pages=self._all))

    def empty_cache(self) -> None:
        """Write the files to the device, and drop them from the system's cache."""
        for path in self._folder.rglob("segment-*.kv"):
            descriptor = os.open(path, os.O_RDWR)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    @contextmanager
    def storing(self) -> Iterator[None]:
        """Stores to the host tier go on all the time within a with block."""
        self._endless = StorePages(seq=1, tier=HOST, sources=self._all, slots=self._all)
        self.copier.submit(self._endless)
        yield
        self.copier.close()
        self.copier.join()

    def _answered(self, event: CopyEvent) -> None:
        if self._endless is not None:
            self.copier.submit(self._endless)
        else:
            self._events.put(event)

    def _ask(self, order: CopyOrder) -> float:
        started = time.perf_counter()
        self.copier.submit(order)
        event = self._events.get()
        seconds = time.perf_counter() - started
        assert isinstance(event, PagesStored | PagesLoaded), event
        assert not event.failed, "every page is copied"
        return seconds


def memory_speed(pool: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", count: int) -> tuple[float, float]:
    """Seconds of one thread to copy so many pages, and to hash them."""
    target = np.ones((count, pool.shape[1]), np.uint8)

    def copy() -> None:
        for index in range(count):
            np.copyto(target[index], pool[index])

    def checksum() -> None:
        for index in range(count):
            xxhash.xxh3_64_intdigest(pool[index].data)

    return _timed(copy), _timed(checksum)


def main(arguments: Sequence[str]) -> int:
    """Print the tables. Raises ConfigError for an unknown model, or a folder that cannot be used."""
    parser = make_parser("tiers", __doc__)
    add_model(parser)
    add_threads(parser)
    add_rounds(parser, 5)
    parser.add_argument("--tokens", type=int, default=8000, metavar="N", help="tokens of the prompt")
    parser.add_argument("--chunk-tokens", type=int, default=512, metavar="N", help="tokens of one forward pass")
    parser.add_argument("--folder", default="", help="on the disk to measure (default: the system's temporary folder)")
    given = parser.parse_args(arguments)
    with console.status("loading the model"):
        size = EngineConfig().page_size
        pages = -(-given.tokens // size)
        engine = EngineConfig(kv_pages=pages, threads=given.threads, cpuinfo=find_cpuinfo(os.environ))
        runner = ModelRunner(
            plan_rank(ModelConfig(model=given.model, dtype=given.dtype, device="cpu"), engine, given.tokens)
        )
        runner.warm_up()
    asked = Prompt(prompt(given.tokens, 1), given.chunk_tokens, size, pages - 1)
    with tempfile.TemporaryDirectory(dir=given.folder or None) as folder:
        tiers = Tiers(runner, asked.prefix_pages, folder)
        seconds = measure(runner, asked, tiers, given.rounds)
    megabytes = asked.prefix_pages * runner.geometry.page_bytes / 1e6
    print_table(
        f"{asked.prefix_pages} pages of {runner.geometry.page_bytes:,} bytes ({given.dtype}), one thread: "
        f"median (range) of {given.rounds} rounds",
        ("", "GB/s"),
        [(name, spread([megabytes / 1e3 / each for each in times])) for name, times in seconds.copies.items()],
    )
    cold = statistics.median(seconds.first_token["computed"])
    print_table(
        f"{given.tokens:,} tokens to the first one, {given.threads} threads: median (range) of {given.rounds} rounds",
        ("", "seconds", "of computing"),
        [
            (name, f"{statistics.median(times):.3f} ({min(times):.3f}-{max(times):.3f})",
             f"{statistics.median(times) / cold:.3f}")
            for name, times in seconds.first_token.items()
        ],
    )  # fmt: skip
    return 0


class Seconds(NamedTuple):
    """What was measured, by name, a value for each round."""

    copies: dict[str, list[float]]
    first_token: dict[str, list[float]]


def measure(runner: ModelRunner, asked: Prompt, tiers: Tiers, rounds: int) -> Seconds:
    """Run all measurements; each round has every one of them."""
    seconds = Seconds({}, {})

    def add(table: dict[str, list[float]], name: str, value: float) -> None:
        table.setdefault(name, []).append(value)

    rows = runner.pool.rows
    assert rows is not None, "the pool is on the CPU"
    with console.status("") as status:
        for number in range(rounds):
            status.update(f"round {number + 1} of {rounds}: computing")
            add(seconds.first_token, "computed", asked.compute(runner))
            expected = asked.finish(runner)
            status.update(f"round {number + 1} of {rounds}: copying")
            copied, hashed = memory_speed(rows, asked.prefix_pages)
            add(seconds.copies, "memory copy alone", copied)
            add(seconds.copies, "XXH3 alone", hashed)
            if not number:
                add(seconds.copies, "host: store, first use of the memory (one round)", tiers.store(HOST))
            add(seconds.copies, "host: store", tiers.store(HOST))
            add(seconds.copies, "disk: store", tiers.store(DISK))
            for name, tier in (("host", HOST), ("disk, cached by the system", DISK), ("disk, cold", DISK)):
                if name.endswith("cold"):
                    tiers.empty_cache()
                runner.pool.tensor.fill_(float("nan"))
                loaded = tiers.load(tier)
                started = time.perf_counter()
                if asked.finish(runner) != expected:
                    raise ConfigError(f"{name}: the first token is another one than without the tier")
                add(seconds.copies, f"{name}: load", loaded)
                add(seconds.first_token, f"prefix from {name}", loaded + time.perf_counter() - started)
        status.update("computing while pages are stored")
        with tiers.storing():
            add(
                seconds.first_token,
                "computed while pages are stored to the host tier (one round)",
                asked.compute(runner),
            )
    return seconds


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    run(main)
