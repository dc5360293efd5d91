"""The exporter with readers in processes of their own, through NIXL: what they read, and when its pages are free."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
import zmq

from headrace.core.runtime.clock import Clock, SystemClock
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.vllm_nixl.kv_pool import VllmPool
from tests.gateway.vllm_nixl.engines import engine, metadata
from tests.gateway.vllm_nixl.scripted_reader import Reader

pytestmark = pytest.mark.nixl

LAYERS, HEADS, DIM, BLOCK, PAGES = 3, 2, 8, 16, 12
LEASE_S = 1.5  # where it is to end


class Site:
    """An exporter with its pool, and the names of loads whose pages it has released."""

    def __init__(self, lease_s: float, clock: Clock | None = None) -> None:
        from headrace.gateway.vllm_nixl.exporter import ExporterOptions, KvExporter  # needs nixl

        geometry = Geometry("float32", LAYERS, HEADS, DIM, BLOCK)
        self.pool = VllmPool(geometry, PAGES)
        block = HEADS * BLOCK * 2 * DIM * 4
        described = metadata(kv_caches_base_addr=(0,) * LAYERS, block_lens=(block,) * LAYERS, block_size=BLOCK)
        self.released: queue.SimpleQueue[str] = queue.SimpleQueue()
        options = ExporterOptions(lease_s=lease_s, limit_s=300)
        probed = engine(geometry=geometry, metadata=described)
        self.exporter = KvExporter(probed, self.pool, options, self.released.put, clock)
        self.exporter.start()

    def fill(self, first: int, tokens: int, seed: int) -> np.ndarray[Any, Any]:
        """Random KV of a prompt; returns the bytes of its blocks as a reader should find them."""
        rng = np.random.default_rng(seed)
        pages = -(-tokens // BLOCK)
        for page in range(first, first + pages):
            self.pool.staging.view(page, 0, BLOCK)[...] = rng.integers(
                1, 255, (LAYERS, 2, HEADS, BLOCK, DIM * 4), np.uint8
            )
        if tokens % BLOCK:
            self.pool.staging.view(first + pages - 1, tokens % BLOCK, BLOCK - tokens % BLOCK)[...] = 0
        rows = [self.pool.staging.read(page, 0, BLOCK) for page in range(first, first + pages)]
        vllm = [row.transpose(0, 2, 3, 1, 4).reshape(LAYERS, -1) for row in rows]
        return np.stack(vllm, axis=1)

    def freed(self, within_s: float = 5.0) -> str:
        return self.released.get(timeout=within_s)

    def count(self, name: str, *labels: str) -> float:
        samples = self.exporter.statistics().samples
        return next(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels))

    def until(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def close(self) -> None:
        self.exporter.stop()
        self.pool.close()


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


@pytest.fixture
def exporting() -> Iterator[Site]:
    made = Site(lease_s=60)
    yield made
    made.close()


@pytest.fixture
def hasty(reader: Reader) -> Iterator[Site]:
    """Its leases end soon; the reader has done its handshake."""
    made = Site(LEASE_S)
    params = made.exporter.offer("warm", 0, 1)
    reader.handshake(params)
    assert reader.read(params) is not None
    assert made.freed() == "warm"
    yield made
    made.close()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100, PAGES * BLOCK])
def test_a_reader_finds_the_prompts_kv_and_nothing_behind_it(exporting: Site, reader: Reader, tokens: int) -> None:
    exporting.fill(0, PAGES * BLOCK, seed=1)
    wanted = exporting.fill(0, tokens, seed=tokens)
    params = exporting.exporter.offer("a", 0, tokens)
    assert reader.handshake(params) == params["remote_engine_id"]
    found = reader.read(params)
    assert found is not None
    assert np.array_equal(found, wanted)
    assert exporting.freed() == "a"
    assert exporting.count("leases_ended_total", "read") == 1


def test_pages_are_free_after_the_last_reader(exporting: Site, reader: Reader) -> None:
    wanted = exporting.fill(2, 40, seed=2)
    params = exporting.exporter.offer("n", 2, 40, jobs=2)
    reader.handshake(params)
    for left in (3, 2, 1):
        assert np.array_equal(reader.read(params, readers=2), wanted)  # type: ignore[arg-type]
        with pytest.raises(queue.Empty):
            exporting.freed(0.2)
        assert left
    reader.read(params, readers=2)
    assert exporting.freed() == "n"


def test_heartbeats_keep_a_lease(hasty: Site, reader: Reader) -> None:
    wanted = hasty.fill(0, 20, seed=3)
    params = hasty.exporter.offer("h", 0, 20)
    for _ in range(8):
        time.sleep(LEASE_S / 4)
        reader.notify(f"HB:other,{params['remote_request_id']}", params["remote_engine_id"])
    assert np.array_equal(reader.read(params), wanted)  # type: ignore[arg-type]
    assert hasty.freed() == "h"
    assert hasty.count("leases_ended_total", "expired") == 0


def test_who_comes_late_reads_nothing(hasty: Site, reader: Reader) -> None:
    """The reader has done its handshake, and is stopped while another prompt takes the pages."""
    hasty.fill(0, 20, seed=4)
    params = hasty.exporter.offer("late", 0, 20)
    assert reader.read(params, notify=False) is not None
    os.kill(reader.process.pid, signal.SIGSTOP)
    assert hasty.freed() == "late"
    assert hasty.count("leases_ended_total", "expired") == 1
    wanted = hasty.fill(0, 20, seed=5)
    again = hasty.exporter.offer("next", 0, 20)
    assert again["remote_engine_id"] != params["remote_engine_id"]
    assert again["remote_port"] == params["remote_port"]
    os.kill(reader.process.pid, signal.SIGCONT)
    assert reader.read(params) is None
    assert reader.handshake(again) == again["remote_engine_id"]
    assert np.array_equal(reader.read(again), wanted)  # type: ignore[arg-type]
    assert hasty.freed() == "next"


def test_pages_wait_for_leases_of_their_generation(hasty: Site, reader: Reader) -> None:
    """One lease expires unread; its pages are free when the other one, which a reader keeps alive, has ended."""
    hasty.exporter.offer("unread", 0, 16)
    wanted = hasty.fill(1, 16, seed=6)
    kept = hasty.exporter.offer("kept", 1, 16)
    for _ in range(6):
        reader.notify(f"HB:{kept['remote_request_id']}", kept["remote_engine_id"])
        with pytest.raises(queue.Empty):
            hasty.freed(LEASE_S / 4)
    assert hasty.count("leases_quarantined") == 1
    assert np.array_equal(reader.read(kept), wanted)  # type: ignore[arg-type]
    assert sorted((hasty.freed(), hasty.freed())) == ["kept", "unread"]
    hasty.until(lambda: hasty.count("nixl_agents") == 1)


def test_who_has_just_done_the_handshake_can_still_read(exporting: Site, reader: Reader) -> None:
    """Its connection is not cut while it is made; its pages have the prompt's KV until it is."""
    wanted = exporting.fill(0, 20, seed=7)
    params = exporting.exporter.offer("slow", 0, 20)
    reader.handshake(params)
    exporting.exporter.withdraw("slow")
    exporting.until(lambda: exporting.count("nixl_agents") == 2)
    with pytest.raises(queue.Empty):
        exporting.freed(1.0)
    assert np.array_equal(reader.read(params), wanted)  # type: ignore[arg-type]
    assert exporting.freed() == "slow"
    exporting.until(lambda: exporting.count("nixl_agents") == 1)


def test_a_killed_engine_ends_its_leases_at_once(exporting: Site) -> None:
    params = exporting.exporter.offer("dead", 0, 16)
    reader = Reader()
    reader.handshake(params)
    reader.close()
    begin = time.monotonic()
    exporting.exporter.engine_gone(reader.agent, [])
    assert exporting.freed() == "dead"
    assert time.monotonic() - begin < 5
    assert exporting.count("leases_ended_total", "engine_gone") == 1


def test_an_offer_that_is_withdrawn(exporting: Site) -> None:
    exporting.exporter.offer("w", 0, 16)
    exporting.exporter.withdraw("w")
    assert exporting.freed() == "w"


def test_rubbish_at_the_side_channel(exporting: Site, reader: Reader) -> None:
    port = exporting.exporter.offer("r", 0, 16)["remote_port"]
    with zmq.Context() as context, ExitStack() as stack:
        sockets = [context.socket(zmq.DEALER) for _ in range(50)]
        for number, socket in enumerate(sockets):
            stack.callback(socket.close, linger=0)
            socket.connect(f"tcp://127.0.0.1:{port}")
            for frames in ([b"", bytes([number])], [b"x"], [b"", b"\xff" * 400], [b"a", b"b", b"c"]):
                socket.send_multipart(frames)
        params = exporting.exporter.offer("s", 1, 16)
        assert reader.handshake(params) == params["remote_engine_id"]
        reader.notify("no notice", params["remote_engine_id"])
        reader.notify("unknown:1", params["remote_engine_id"])
        assert reader.read(params) is not None
        assert exporting.freed() == "s"


@pytest.mark.parametrize(("first", "tokens"), [(0, 0), (-1, 16), (0, PAGES * BLOCK + 1), (PAGES, 1)])
def test_pages_outside_the_pool_are_never_offered(exporting: Site, first: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="pages"):
        exporting.exporter.offer("x", first, tokens)


class Jumping(SystemClock):
    """A clock that went on while the process did not run."""

    def __init__(self) -> None:
        self.missed_s = 0.0

    def now(self) -> float:
        return super().now() + self.missed_s


def test_time_in_which_it_did_not_run_ends_no_lease_and_is_counted(reader: Reader) -> None:
    clock = Jumping()
    with closing(Site(LEASE_S, clock)) as site:
        params = site.exporter.offer("a", 0, BLOCK)
        clock.missed_s = 100 * LEASE_S
        site.until(lambda: site.count("paused_seconds_total") > 99 * LEASE_S)
        assert site.count("leases_open") == 1
        reader.handshake(params)
        assert reader.read(params) is not None
        assert site.freed() == "a"
