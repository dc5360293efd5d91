"""Which way payload moves: the choice at the hello, and what both ends do when it does not hold."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.messages.peers import EndPeer, PeerGone, PeerJoined, PrefillDown, PrefillUp
from headrace.core.stats import Counters
from headrace.core.types.kv.backends import (
    BACKENDS,
    CUDA_IPC,
    FAKE,
    NIXL,
    SHM,
    ZMQ,
    CudaIpcMemory,
    NixlMemory,
    PoolMemory,
    SharedMemory,
)
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.copying import copy_rows
from headrace.transfer.backends.strided_pool import ArrayPageStore
from headrace.transfer.control.connection import ControlConnection
from headrace.transfer.data import payload
from headrace.transfer.protocol import checksum
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, copies, overlap, pages_for
from headrace.transfer.protocol.matching import choose_backend
from headrace.transfer.protocol.messages import Goodbye, Hello, Refuse, Welcome
from headrace.transfer.protocol.page_store import SourcePages
from tests.transfer.control.session_table import CONFIG, GEOMETRY, OFFER, book, hello
from tests.transfer.harness import random_store

HERE, ELSEWHERE = "boot.1a", "boot.1b"


def shared(host: str = HERE, pages: int = 100) -> PoolMemory:
    return PoolMemory(shm=SharedMemory(host=host, name="kv", bytes=1, pages=pages, strides=(1, 1, 1, 1, 1)))


def reachable(version: str = "1.5", pages: int = 100) -> PoolMemory:
    return PoolMemory(nixl=NixlMemory(version=version, bytes=1, pages=pages, strides=(1, 1, 1, 1, 1)))


def on_gpu(host: str = HERE, pages: int = 100, device: str = "GPU-1") -> PoolMemory:
    return PoolMemory(
        cuda_ipc=CudaIpcMemory(host=host, name="kv", device=device, bytes=1, pages=pages, strides=(1, 1, 1, 1, 1))
    )


def both(host: str = HERE) -> PoolMemory:
    return PoolMemory(shm=shared(host).shm, nixl=reachable().nixl)


def offer(
    *backends: str, hosts: tuple[str, ...] = (HERE,), nixl: tuple[str, ...] = ("1.5",), beyond: tuple[str, ...] = ()
) -> Any:
    sets = {"shared_memory": frozenset(hosts), "nixl": frozenset(nixl), "unreachable_gpus": frozenset(beyond)}
    return replace(OFFER, backends=backends, **sets)


@pytest.mark.parametrize(
    ("ours", "theirs", "memory", "hosts", "backend", "reason"),
    [
        ((SHM, ZMQ), (SHM, ZMQ), (shared(),), (HERE,), SHM, "first choice"),
        ((ZMQ, SHM), (SHM, ZMQ), (shared(),), (HERE,), ZMQ, "first choice"),
        ((SHM, ZMQ), (ZMQ,), (), (HERE,), ZMQ, "not shm: the peer accepts zmq"),
        ((SHM, ZMQ), (SHM, ZMQ), (shared(ELSEWHERE),), (HERE,), ZMQ, "not shm: the stages of the two are not on one"),
        ((SHM, ZMQ), (SHM, ZMQ), (shared(),), (HERE, ELSEWHERE), ZMQ, "not on one host"),
        ((SHM, ZMQ), (SHM, ZMQ), (), (HERE,), ZMQ, "shares 0 pools of 1"),
        ((SHM, ZMQ), (SHM, ZMQ), (PoolMemory(),), (HERE,), ZMQ, "shares 0 pools of 1"),
        ((SHM, ZMQ), (SHM, ZMQ), (shared(pages=99),), (HERE,), ZMQ, "shares 99 pages of 100"),
        ((SHM, NIXL, ZMQ), (SHM, NIXL, ZMQ), (both(),), (HERE,), SHM, "first choice"),
        ((SHM, NIXL, ZMQ), (SHM, NIXL, ZMQ), (both(ELSEWHERE),), (HERE,), NIXL, "not shm: the stages of the two are"),
        ((SHM, NIXL, ZMQ), (SHM, NIXL, ZMQ), (reachable(),), (HERE,), NIXL, "not shm: the peer shares 0 pools of 1"),
        ((SHM, NIXL, ZMQ), (SHM, ZMQ), (shared(ELSEWHERE),), (HERE,), ZMQ, "not nixl: the peer accepts shm, zmq"),
        ((SHM, ZMQ), (SHM, NIXL, ZMQ), (both(ELSEWHERE),), (HERE,), ZMQ, "not on one host"),
        ((NIXL, ZMQ), (NIXL, ZMQ), (reachable("1.6"),), (HERE,), ZMQ, "the stages of the two have versions 1.5, 1.6"),
        ((NIXL, ZMQ), (NIXL, ZMQ), (reachable(pages=99),), (HERE,), ZMQ, "shares 99 pages of 100"),
        ((FAKE,), (ZMQ, FAKE), (), (HERE,), FAKE, "first choice"),
        ((SHM,), (SHM,), (shared(ELSEWHERE),), (HERE,), "", "not on one host"),
        ((SHM,), (ZMQ,), (), (HERE,), "", "the peer accepts zmq"),
    ],
)
def test_the_first_way_of_the_prefill_server_that_works_is_taken(
    ours: tuple[str, ...],
    theirs: tuple[str, ...],
    memory: tuple[PoolMemory, ...],
    hosts: tuple[str, ...],
    backend: str,
    reason: str,
) -> None:
    said = hello(backends=theirs, memory=memory)
    chosen = choose_backend(offer(*ours, hosts=hosts), said)
    assert chosen.backend == backend
    assert reason in chosen.reason


GPUS = (CUDA_IPC, SHM, NIXL, ZMQ)


@pytest.mark.parametrize(
    ("memory", "hosts", "beyond", "backend", "reason"),
    [
        ((on_gpu(),), (HERE,), (), CUDA_IPC, "first choice"),
        ((on_gpu(),), (HERE,), ("GPU-2",), CUDA_IPC, "first choice"),
        ((on_gpu(),), (HERE,), ("GPU-1", "GPU-2"), ZMQ, "no peer access from all GPUs of this server to GPU-1;"),
        ((on_gpu(ELSEWHERE),), (HERE,), (), ZMQ, "not cuda_ipc: the stages of the two are not on one host"),
        ((on_gpu(),), (HERE, ELSEWHERE), (), ZMQ, "not cuda_ipc: the stages of the two are not on one host"),
        ((on_gpu(pages=99),), (HERE,), (), ZMQ, "not cuda_ipc: the peer shares 99 pages of 100"),
        ((shared(),), (HERE,), (), SHM, "not cuda_ipc: the peer shares 0 pools of 1"),
        ((PoolMemory(nixl=reachable().nixl, cuda_ipc=on_gpu().cuda_ipc),), (HERE,), (), CUDA_IPC, "first choice"),
        ((PoolMemory(nixl=reachable().nixl, cuda_ipc=on_gpu(ELSEWHERE).cuda_ipc),), (HERE,), (), NIXL, "not cuda_ipc"),
    ],
)
def test_a_gpu_writes_into_those_of_its_host_that_it_reaches(
    memory: tuple[PoolMemory, ...], hosts: tuple[str, ...], beyond: tuple[str, ...], backend: str, reason: str
) -> None:
    said = hello(backends=GPUS, memory=memory)
    chosen = choose_backend(offer(*GPUS, hosts=hosts, beyond=beyond), said)
    assert chosen.backend == backend
    assert reason in chosen.reason


def test_what_one_side_has_no_gpu_for_goes_another_way() -> None:
    """A stage on a CPU does not offer it, and neither does an earlier release."""
    for ours, theirs in ((GPUS[1:], GPUS), (GPUS, GPUS[1:])):
        assert choose_backend(offer(*ours), hello(backends=theirs, memory=(on_gpu(),))).backend == ZMQ


@given(st.permutations(BACKENDS), st.sets(st.sampled_from(BACKENDS)), *[st.booleans()] * 4)
def test_what_is_chosen_is_possible_and_nothing_before_it_is(
    ours: list[str], theirs: set[str], here: bool, shares: bool, same: bool, reached: bool
) -> None:
    host, version = HERE if here else ELSEWHERE, "1.5" if same else "1.4"
    memory = PoolMemory(shm=shared(host).shm, nixl=reachable(version).nixl, cuda_ipc=on_gpu(host).cuda_ipc)
    said = hello(backends=tuple(theirs), memory=(memory,) if shares else ())
    chosen = choose_backend(offer(*ours, beyond=() if reached else ("GPU-1",)), said).backend
    needs = {CUDA_IPC: here and shares and reached, SHM: here and shares, NIXL: same and shares}
    possible = [name for name in ours if name in theirs and needs.get(name, True)]
    assert chosen == (possible[0] if possible else "")


def test_the_choice_is_in_the_welcome_and_goes_to_the_stages() -> None:
    made = book()
    made.ready(offer(SHM, ZMQ))
    said = hello(backends=(SHM, ZMQ), memory=(shared(),))
    [(_, welcome)], [joined] = made.receive(b"a", said, 0.0)
    assert isinstance(welcome, Welcome)
    assert isinstance(joined, PeerJoined)
    assert welcome.backend == joined.terms.backend == SHM
    assert joined.terms.memory == said.memory


def test_a_hello_without_a_common_way_is_refused_naming_both() -> None:
    made = book()
    made.ready(offer(SHM, hosts=(ELSEWHERE,)))
    [(_, refuse)], _ = made.receive(b"a", hello(backends=(SHM, FAKE), memory=(shared(),)), 0.0)
    assert refuse == Refuse(
        code="backend_mismatch",
        message="backend: shm (not shm: the stages of the two are not on one host) at the prefill server, "
        "shm, fake at the decode server",
    )


def test_a_control_endpoint_that_cannot_vouch_ends_the_session_instead_of_its_tickets() -> None:
    made = book()
    [(_, welcome)], _ = made.receive(b"a", hello(), 0.0)
    assert isinstance(welcome, Welcome)
    replies, events = made.tell(EndPeer(session=welcome.session, reason="stage 0 failed"), 0.0)
    assert replies == [(b"a", Goodbye(reason="stage 0 failed"))]
    assert events == [PeerGone(session=welcome.session, reason="stage 0 failed", name="decode")]
    assert made.tell(EndPeer(session=welcome.session, reason="again"), 0.0) == ([], [])


def test_a_peer_whose_pool_is_another_one_begins_a_new_session_before_it_asks_for_more() -> None:
    said: list[Hello] = [hello(memory=(shared(),))]
    link = ControlConnection("p", "127.0.0.1", lambda: said[-1], CONFIG, Counters())
    assert link.tick(0.0).sends == [said[0]]
    [(_, welcome)], _ = book().receive(b"a", said[0], 0.0)
    assert isinstance(welcome, Welcome)
    assert [type(event) for event in link.receive(welcome, 0.0).events] == [PrefillUp]
    assert link.session == welcome.session
    said.append(hello(memory=(replace(shared(), shm=None),)))
    link.outdate()
    assert link.session is None, "nothing is reserved in the old session any more"
    assert link.next_deadline() == 0.0
    [down] = link.tick(0.1).events
    assert isinstance(down, PrefillDown)
    assert down.session == welcome.session
    again = link.tick(0.1)
    assert again.sends == [said[1]]
    assert again.reconnect


DRAFT = Component("draft", "float32", layers=2, kv_heads=3, head_dim=2)
LATENT = Component("latent", "float16", layers=3, kv_heads=1, head_dim=5, planes=1)


class Remote(RemotePages):
    """Over a store in this process."""

    def __init__(self, store: ArrayPageStore) -> None:
        self._store = store

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        self._store.write(page, first_slot, count, data, box)

    def write_pages(self, pages: Sequence[int], store: SourcePages, own: Sequence[int]) -> None:
        target, source = self._store.rows, store.rows
        assert target is not None
        assert source is not None
        copy_rows(target, pages, source, own)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_writing_through_is_the_same_as_frames_and_their_checksum(data: st.DataObject) -> None:
    """From pool to pool without frames, and read back where it lies: what frames would have brought, to the byte."""
    draw = data.draw
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 4))

    def rank(page_size: int) -> Geometry:
        first, head = draw(st.integers(0, layers - 1)), draw(st.integers(0, heads - 1))
        return Geometry(
            "float16",
            draw(st.integers(1, layers - first)),
            draw(st.integers(1, heads - head)),
            3,
            page_size,
            first,
            head,
            draw(st.sampled_from([(), (DRAFT,), (LATENT, DRAFT)])),
        )

    source = rank(draw(st.integers(1, 9)))
    destination = source if draw(st.booleans()) else rank(draw(st.integers(1, 9)))
    if overlap(source, destination) is None:
        return
    start, count = draw(st.integers(0, 30)), draw(st.integers(0, 40))
    passage = payload.Passage(source, destination, start, count)
    plan = copies(*passage)
    pages = draw(st.permutations(range(45)))[: pages_for(source.page_size, start, count)]
    peer_pages = draw(st.permutations(range(45)))[: pages_for(destination.page_size, start, count)]
    store = random_store(source, 45, seed=1)
    framed, direct, unchecked = (random_store(destination, 45, seed=2) for _ in range(3))

    frames = payload.frames(store, passage, pages)
    payload.write_frames(framed, plan, peer_pages, [frame.data for frame in frames])
    digest = checksum.Digest()
    payload.write_through(store, Remote(direct), passage, pages, peer_pages, digest)
    payload.write_through(store, Remote(unchecked), passage, pages, peer_pages, None)

    for name, data in framed.tensors.items():
        assert np.array_equal(direct.tensors[name], data)
        assert np.array_equal(unchecked.tensors[name], data)
    assert digest.intdigest() == checksum.of_frames(frames)
    assert checksum.of_frames(payload.in_place(direct, plan, peer_pages)) == digest.intdigest()


def test_a_pool_splits_over_stages_of_which_each_is_shared_on_its_own() -> None:
    """One stage of the peer elsewhere, so not all of it can be written."""
    half = replace(GEOMETRY, layers=2)
    geometries = (half, replace(half, layer_start=2))
    for hosts in product((HERE, ELSEWHERE), repeat=2):
        said = hello(geometries=geometries, backends=(SHM, ZMQ), memory=tuple(shared(host) for host in hosts))
        assert choose_backend(offer(SHM, ZMQ), said).backend == (SHM if set(hosts) == {HERE} else ZMQ)
