"""KV through NIXL between processes: the right bytes, and none where nobody waits for them.

Pages that were given back are poisoned; whatever is written into them later is found.
"""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core.arrays import pack
from core.backends import NIXL, NixlAccess, NixlMemory, PoolMemory
from core.config import TransferConfig
from core.geometry import Component, Geometry
from core.orders import (
    Acked,
    AdmitPeer,
    Arrived,
    Cancel,
    ChunkArrived,
    Dial,
    DropPeer,
    Expect,
    FetchFailed,
    HangUp,
    HungUp,
    PeerLost,
    Quiet,
    Send,
    SendFailed,
)
from tests.transfer.harness import FIRST, Loop, gather, random_store, value, zmq_context
from tests.transfer.nixl_stage import Process, Setup
from transfer.arrays import ArrayPageStore
from transfer.layout import pages_for
from transfer.receiver import Receiver

pytestmark = pytest.mark.nixl

BIG = Geometry("float16", layers=8, kv_heads=4, head_dim=64, page_size=32)  # 256 KiB a page
PAGES = 400
POISON = 0xEE
CONFIG = TransferConfig(backends=(NIXL,), window_bytes=1 << 30)


class Handoff:
    """A prefill stage in another process, and a decode stage here."""

    def __init__(self, context: Any, source: Geometry, destination: Geometry, pages: int = PAGES) -> None:
        from transfer.backends.nixl import LOOPBACK, NixlExposure

        self.source, self.destination = source, destination
        self.store = random_store(source, pages, seed=1)  # the twin of what the other process has
        self.target = random_store(destination, pages, seed=2)
        self.exposure = NixlExposure(destination, pages, memoryview(self.target.memory), LOOPBACK)
        self.receiver = Receiver(
            CONFIG,
            stage=0,
            geometry=destination,
            store=self.target,
            context=context,
            exposures={NIXL: self.exposure},
        )
        self.loop = Loop(self.receiver)
        self.stage = Process("stage", Setup(source, pages, CONFIG), self.loop)
        self.processes = [self.stage]

    def join(self, session: str) -> None:
        """Begin a session with the decode stage that is here."""
        self.admit(session, self.destination, self.exposure.memory)
        self.loop.apply(self.receiver, self.dial(session))

    def admit(self, session: str, geometry: Geometry, memory: NixlMemory) -> None:
        self.stage.order(
            AdmitPeer(
                seq=0,
                session=session,
                geometry=geometry,
                window_bytes=CONFIG.window_bytes,
                backend=NIXL,
                memory=(PoolMemory(nixl=memory),),
            )
        )

    def dial(self, session: str) -> Dial:
        return Dial(
            seq=0,
            session=session,
            endpoints=(f"tcp://127.0.0.1:{self.stage.hello['port']}",),
            geometries=(self.source,),
            window_bytes=CONFIG.window_bytes,
            backend=NIXL,
        )

    def expect(self, request: int, session: str, pages: Any, start: int, count: int) -> Expect:
        return Expect(
            seq=0,
            request=request,
            session=session,
            ticket=f"ticket-{request}",
            generation=1,
            start=start,
            count=count,
            pages=pack(pages),
            row=request,
        )

    def send(self, request: int, session: str, pages: Any, dst_pages: Any, start: int, count: int) -> None:
        """All in one chunk."""
        self.stage.order(
            Send(
                after=0,
                seq=0,
                request=request,
                session=session,
                ticket=f"ticket-{request}",
                generation=1,
                chunk=0,
                start=start,
                count=count,
                pages=pack(pages),
                dst_pages=pack(dst_pages),
                row=0,
                dst_row=request,
                last=FIRST,
            )
        )

    def fetch(self, request: int, session: str, pages: Any, dst_pages: Any, start: int, count: int) -> None:
        self.loop.apply(self.receiver, self.expect(request, session, dst_pages, start, count))
        self.send(request, session, pages, dst_pages, start, count)

    def stage_elsewhere(self, folder: Path) -> Process:
        """A decode stage in a process of its own. It is its pool that is looked at from now on."""
        file = folder / "pool"
        file.write_bytes(bytes(self.target.memory))
        setup = Setup(self.destination, PAGES, CONFIG, str(file))
        peer = Process("peer", setup, self.loop)
        self.processes.append(peer)
        self.target = ArrayPageStore(self.destination, PAGES, setup.mapped())
        return peer

    def join_elsewhere(self, peer: Process, session: str) -> None:
        self.admit(session, self.destination, NixlMemory(**peer.hello["memory"]))
        peer.order(self.dial(session))

    def fetch_elsewhere(self, peer: Process, request: int, session: str, pages: range) -> None:
        """The same pages there as here."""
        start, count = 0, len(pages) * self.source.page_size
        peer.order(self.expect(request, session, pages, start, count))
        self.send(request, session, pages, pages, start, count)

    def flood(self, request: int, session: str) -> None:
        """Have every page of the big pools written, and come back in the middle of it."""
        self.target.data[:] = POISON
        self.fetch(request, session, range(PAGES), range(PAGES), 0, PAGES * BIG.page_size)
        self.loop.until(lambda: self.written() > 0.02, 20.0)

    def written(self) -> float:
        """The share of pages that somebody has begun to write."""
        return float((self.target.data.reshape(PAGES, -1)[:, ::4096] != POISON).any(axis=1).mean())

    def stays_poisoned(self, seconds: float = 0.5) -> bool:
        self.target.data[:] = POISON
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.loop.turn()
        return bool((self.target.data == POISON).all())

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.loop.close()
        self.exposure.close()


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[Handoff] = []
    with zmq_context() as context:

        def handoff(*arguments: Any) -> Handoff:
            made.append(Handoff(context, *arguments))
            return made[-1]

        yield handoff
        for one in made:
            one.close()


@pytest.fixture
def big(make: Any) -> Handoff:
    handoff: Handoff = make(BIG, BIG)
    handoff.join("s" * 32)
    return handoff


@pytest.mark.parametrize("seed", range(6))
def test_bytes_are_right_for_random_geometries(make: Any, seed: int) -> None:
    """Other page sizes, and other layers and heads of which a part is shared; with components and without."""
    draw = random.Random(seed)
    latent = Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1)
    components = (latent, Component("draft", "float16", layers=1, kv_heads=2, head_dim=5)) if seed % 2 else ()
    layers, heads = draw.randint(1, 5), draw.randint(1, 4)
    first, head = draw.randrange(layers), draw.randrange(heads)
    source = Geometry("float16", layers, heads, draw.randint(1, 9), draw.randint(1, 40), components=components)
    destination = Geometry(
        "float16",
        draw.randint(1, layers - first),
        draw.randint(1, heads - head),
        source.head_dim,
        draw.randint(1, 40),
        first,
        head,
        components[::-1],
    )
    handoff = make(source, destination, 64)
    handoff.join("s" * 32)
    for request in range(1, 6):
        start, count = draw.randint(0, 30), draw.randint(1, 60)
        pages = draw.sample(range(64), pages_for(source.page_size, start, count))
        dst_pages = draw.sample(range(64), pages_for(destination.page_size, start, count))
        before = {name: data.copy() for name, data in handoff.target.tensors.items()}
        handoff.fetch(request, "s" * 32, pages, dst_pages, start, count)
        handoff.loop.wait_for(handoff.receiver, Arrived, request, 20.0)
        wanted = gather(handoff.store, source, pages, start, count)
        wanted = wanted[:, first : first + destination.layers, :, head : head + destination.kv_heads]
        assert np.array_equal(gather(handoff.target, destination, dst_pages, start, count), wanted)
        for part in components:
            wanted = gather(handoff.store, source, pages, start, count, part.name)
            assert np.array_equal(gather(handoff.target, destination, dst_pages, start, count, part.name), wanted)
        others = sorted(set(range(64)) - set(dst_pages))
        for name, data in handoff.target.tensors.items():
            assert np.array_equal(data[others], before[name][others])
    statistics = handoff.receiver.statistics()
    assert value(statistics, "bytes_received_total", ("nixl",)) > 0
    assert value(statistics, "bytes_received_total", ("zmq",)) == 0


def test_after_quiet_nothing_is_written(big: Handoff) -> None:
    """A cancel in the middle of a transfer is answered only when no byte of it is under way."""
    big.flood(1, "s" * 32)
    big.stage.order(Cancel(seq=0, request=1))
    big.stage.wait_for(Quiet)
    assert big.stays_poisoned()
    big.fetch(2, "s" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.stage.wait_for(Acked)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])


def test_a_killed_writer_writes_no_more_once_its_right_is_taken_back(big: Handoff) -> None:
    big.flood(1, "s" * 32)
    big.stage.kill()
    big.loop.apply(big.receiver, HangUp(seq=0, session="s" * 32))
    assert big.loop.of(big.receiver, HungUp), "nobody has to be waited for"
    assert big.stays_poisoned()


def test_a_stopped_writer_that_goes_on_later_writes_nothing(big: Handoff, tmp_path: Path) -> None:
    """Its writes were posted, and were under way when it was stopped; the right to write ends meanwhile. Whom it writes
    to is stopped first: over TCP nothing but what the kernel has buffered can come then, so there is a middle."""
    owner, session = big.stage_elsewhere(tmp_path), "o" * 32
    big.join_elsewhere(owner, session)
    big.fetch_elsewhere(owner, 1, session, range(1))
    big.stage.wait_for(Acked)
    big.target.data[:] = POISON
    owner.send_signal(signal.SIGSTOP)
    big.fetch_elsewhere(owner, 2, session, range(PAGES))
    big.send(3, session, [0], [PAGES], 0, BIG.page_size)
    assert big.stage.wait_for(SendFailed).request == 3, "so the one before it is posted"
    big.stage.send_signal(signal.SIGSTOP)
    owner.send_signal(signal.SIGCONT)
    big.loop.until(lambda: big.written() > 0, 20.0)
    owner.order(HangUp(seq=0, session=session))
    owner.wait_for(HungUp)
    assert big.written() < 0.98, "it was stopped in the middle"
    assert big.stays_poisoned(0.2)
    big.stage.send_signal(signal.SIGCONT)
    assert big.stays_poisoned(1.0)
    assert big.stage.wait_for(PeerLost).session == session, "it finds out, and its session ends"
    big.stage.order(Cancel(seq=0, request=2))
    assert big.stays_poisoned(0.3)
    assert not big.stage.of(Quiet), "it cannot know when the last byte has come"
    big.stage.order(DropPeer(seq=0, session=session))
    big.stage.wait_for(Quiet)
    big.join_elsewhere(owner, "t" * 32)  # the next session is as good as the first
    big.fetch_elsewhere(owner, 4, "t" * 32, range(8, 12))
    big.loop.until(lambda: len(owner.of(Arrived)) == 2, 20.0)
    assert np.array_equal(big.target.data[8:12], big.store.data[8:12])


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_goes_on_for_others_when_a_peer_dies_or_stops(big: Handoff, how: signal.Signals) -> None:
    """In the middle of writing to it. The source's pages come back when its session has ended."""
    peer = Process("peer", Setup(BIG, PAGES, CONFIG), big.loop)
    big.processes.append(peer)
    big.join_elsewhere(peer, "p" * 32)
    big.fetch_elsewhere(peer, 7, "p" * 32, range(PAGES))
    time.sleep(0.1)
    peer.send_signal(how)
    for request in range(1, 4):
        big.fetch(request, "s" * 32, range(8), range(8), 0, 8 * BIG.page_size)
        big.loop.wait_for(big.receiver, Arrived, request, 20.0)
    assert np.array_equal(big.target.data[:8], big.store.data[:8])
    big.stage.order(DropPeer(seq=0, session="p" * 32))
    big.stage.order(Cancel(seq=0, request=7))
    assert big.stage.wait_for(Quiet).request == 7
    big.fetch(4, "s" * 32, range(8, 16), range(8, 16), 0, 8 * BIG.page_size)
    big.loop.wait_for(big.receiver, Arrived, 4, 20.0)
    assert np.array_equal(big.target.data[8:16], big.store.data[8:16])


def test_sessions_have_rights_of_their_own(big: Handoff) -> None:
    big.join("t" * 32)
    big.loop.until(lambda: value(big.receiver.statistics(), "data_connections") == 2, 20.0)
    big.loop.apply(big.receiver, HangUp(seq=0, session="s" * 32))
    big.fetch(1, "t" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.loop.wait_for(big.receiver, Arrived, 1, 20.0)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])


def test_pages_that_the_peer_has_not_fail_the_request(big: Handoff) -> None:
    big.loop.until(lambda: value(big.receiver.statistics(), "data_connections") == 1, 20.0)
    big.send(1, "s" * 32, [0], [PAGES], 0, BIG.page_size)
    failed = big.stage.wait_for(SendFailed)
    assert (failed.code, failed.message) == ("bad_chunk", f"slots 0 to 32 of page {PAGES}: {PAGES} pages of 32")


@pytest.mark.parametrize("metadata", [b"x", b"nixlSerDes|Agent", bytes(300)])
def test_kv_comes_in_frames_where_the_agent_cannot_be_reached(big: Handoff, metadata: bytes) -> None:
    big.exposure = SimpleNamespace(  # type: ignore[assignment]
        memory=big.exposure.memory,
        grant=lambda session: NixlAccess(metadata=metadata, address=0),
        revoke=big.exposure.revoke,
        close=big.exposure.close,
    )
    big.receiver._exposures[NIXL] = big.exposure
    big.join("t" * 32)
    big.fetch(1, "t" * 32, range(4), range(4), 0, 4 * BIG.page_size)
    big.loop.wait_for(big.receiver, Arrived, 1, 20.0)
    assert np.array_equal(big.target.data[:4], big.store.data[:4])
    assert value(big.receiver.statistics(), "bytes_received_total", ("zmq",)) == 4 * BIG.page_bytes


def test_a_pool_in_use_by_no_session_has_no_agent_to_reach(big: Handoff) -> None:
    """What was granted to an ended session opens nothing, even to somebody who kept it."""
    from transfer.backends.nixl import LOOPBACK, NixlReach

    kept = big.exposure.grant("k" * 32)
    assert big.exposure.revoke("k" * 32, 0)
    source = random_store(BIG, 4)
    reach = NixlReach(memoryview(source.data.reshape(-1)), LOOPBACK)
    big.target.data[:] = POISON
    try:
        pages = reach.open("k" * 32, 0, BIG, PoolMemory(nixl=big.exposure.memory), kept)
        pages.write(0, 0, BIG.page_size, source.data[0])
        write = pages.flush()
        end = time.monotonic() + 5
        while not write.lost and time.monotonic() < end:
            assert not write.done
            time.sleep(0.01)
        assert write.lost
        pages.close()
        assert write.done, "our own memory is free again"
    except OSError:
        pass  # it is noticed here where the connection is made at once
    assert (big.target.data == POISON).all()
    reach.close()


def test_what_a_flood_leaves_behind(big: Handoff) -> None:
    """The transfer that the other tests interrupt, left alone: every byte, acknowledged."""
    big.flood(1, "s" * 32)
    big.loop.wait_for(big.receiver, Arrived, 1, 30.0)
    big.stage.wait_for(Acked)
    assert np.array_equal(big.target.data, big.store.data)
    assert big.loop.of(big.receiver, ChunkArrived)
    assert not big.loop.of(big.receiver, FetchFailed)
