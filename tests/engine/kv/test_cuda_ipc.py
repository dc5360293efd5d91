"""Pools of GPUs that other processes of the host write into: which bytes land where, and who may still write when."""

import logging
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.orders import CancelSend, DropPeer
from headrace.core.messages.stage_events import KvReceived, SendCancelled
from headrace.core.types.kv.backends import CUDA_IPC, SHM, ZMQ, CudaIpcMemory, PoolMemory
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.kv.cuda_ipc_pages import CudaIpcPages, CudaIpcTransport
from headrace.engine.kv.kv_memory import KvMemory
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.cuda_driver import CudaIpc
from headrace.transfer.backends.cuda_ipc import TEARDOWN_S
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import ArrayPageStore, c_order
from headrace.transfer.backends.writer_locks import FOLDER, host_token
from headrace.transfer.data import payload
from headrace.transfer.protocol.layout import copies, pages_for
from tests.engine.kv.fake_cuda import FakeGpus, OnGpu, Queue, compiled, filled, opened, share, share_with
from tests.transfer.children import child, line_of
from tests.transfer.harness import CONFIG, Pair, value, zmq_context
from tests.transfer.layouts import random_layout

pytestmark = pytest.mark.skipif(not host_token(), reason="no shared memory here")

GEOMETRY = Geometry("float16", layers=3, kv_heads=2, head_dim=4, page_size=8)
SESSION = "s" * 32
PAGES = 32
LATENT = Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1)
RING = Component("ring", "float32", 2, 2, 3, 2, per_request=True, window=4)
GRACE_S = TEARDOWN_S + 0.001


class Clock:
    """A time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def gpus(library: str) -> Iterator[FakeGpus]:
    made = FakeGpus(library)
    yield made
    made.set("peers", 1)
    made.set("expandable", 0)
    assert not made.mappings
    made.free()


class Peer:
    """A decode stage's pool that is shared."""

    def __init__(self, gpus: FakeGpus, geometry: Geometry = GEOMETRY) -> None:
        self.gpus, self.clock = gpus, Clock()
        self.pool = filled(gpus.pool(geometry, PAGES), 2)
        self.shared = share(gpus, self.pool, self.clock)
        self.memory = self.shared.memory

    def opened(self, own: KVPool, session: str = SESSION, queue: Queue | None = None) -> CudaIpcPages:
        return opened(self.gpus, own, self.pool.geometry, self.memory, session, queue)

    @property
    def path(self) -> Path:
        return FOLDER / self.memory.name

    def revoked(self, stage: int = 0) -> bool:
        """Whether the right is taken back, however long that takes."""
        self.shared.revoke(SESSION, stage)
        self.clock.now += GRACE_S
        return self.shared.revoke(SESSION, stage)


@pytest.fixture
def peer(gpus: FakeGpus) -> Iterator[Peer]:
    made = Peer(gpus)
    yield made
    made.shared.close()


@pytest.fixture
def own(gpus: FakeGpus) -> KVPool:
    return filled(gpus.pool(GEOMETRY, PAGES), 1)


def same(pool: KVPool, pages: Sequence[int], other: KVPool, others: Sequence[int]) -> bool:
    """Whether pages have the same bytes."""
    return torch.equal(pool.memory.view(PAGES, -1)[list(pages)], other.memory.view(PAGES, -1)[list(others)])


def rank(data: st.DataObject, components: tuple[Component, ...]) -> Geometry:
    """A shard of a model of 4 layers and 3 heads."""
    layer, layers = data.draw(st.sampled_from([(0, 4), (0, 2), (1, 3), (2, 2)]))
    head, heads = data.draw(st.sampled_from([(0, 3), (0, 2), (1, 2), (2, 1)]))
    return Geometry("bfloat16", layers, heads, 2, data.draw(st.integers(1, 9)), layer, head, components)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), random=st.randoms(use_true_random=False))
def test_bytes_land_where_frames_would_have_brought_them(library: str, data: st.DataObject, random: Random) -> None:
    """Whole pages, slots, shards of layers and heads, states; into pools of any layout whose elements are aligned."""
    gpus = FakeGpus(library)
    components = data.draw(st.sampled_from([(), (LATENT,), (LATENT, RING)]))
    source = rank(data, components)
    target = data.draw(st.sampled_from([source, rank(data, components), rank(data, components)]))
    layout = c_order(target, PAGES)
    if RING not in components and data.draw(st.booleans()):
        layout = random_layout(target, PAGES, random, step=4)
    shared, pool = share_with(gpus, target, layout)
    own, expected = filled(gpus.pool(source, PAGES), 1), ArrayPageStore(target, PAGES)
    for name, tensor in pool.tensors.items():
        tensor[...] = np.random.default_rng(3).integers(0, 256, tensor.shape, np.uint8)
        expected.tensors[name][...] = tensor
    start, count = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 30))
    passage = payload.Passage(source, target, start, count, RING in components)
    slots = ([3], [5]) if RING in components else ([], [])
    ids, peer_ids = (
        [*data.draw(st.permutations(range(PAGES)))[: pages_for(each.page_size, start, count)], *slot]
        for each, slot in zip((source, target), slots, strict=True)
    )
    sent = payload.frames(own, passage, ids)
    payload.write_frames(expected, list(copies(*passage)), peer_ids, [frame.data for frame in sent])

    pages = opened(gpus, own, target, shared.memory, SESSION)
    payload.write_through(own.in_place(), pages, passage, ids, peer_ids, None)
    assert pages.flush().done
    assert pages.close().done
    for name, tensor in pool.tensors.items():
        assert np.array_equal(tensor, expected.tensors[name])
    shared.close()
    gpus.free()


def test_a_chunk_of_many_blocks_is_the_same(peer: Peer, own: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.kv.cuda_ipc_pages.BLOCK_BYTES", 3 * GEOMETRY.page_bytes)
    pages = peer.opened(own)
    pages.write_pages(range(10), own.in_place(), range(20, 30))
    pages.flush()
    assert same(peer.pool, range(10), own, range(20, 30))
    assert pages.close().done


@pytest.mark.parametrize(("page", "slot", "count"), [(-1, 0, 1), (PAGES, 0, 1), (0, -1, 1), (0, 8, 1), (0, 7, 2)])
def test_a_write_beside_the_pool_is_refused(peer: Peer, own: KVPool, page: int, slot: int, count: int) -> None:
    before = peer.pool.memory.clone()
    pages = peer.opened(own)
    with pytest.raises(IndexError):
        pages.write(page, slot, count, own.view(0, 0, count))
    with pytest.raises(IndexError):
        pages.write_pages([page if count == 1 and slot == 0 else PAGES], own.in_place(), [0])
    assert pages.flush().done
    assert torch.equal(peer.pool.memory, before)
    assert pages.close().done


def test_the_right_is_kept_until_the_device_has_done_the_last_copy(peer: Peer, own: KVPool) -> None:
    queue = Queue(slow=True)
    pages = peer.opened(own, queue=queue)
    pages.write_pages([4], own.in_place(), [9])
    write = pages.flush()
    pages.write_pages([5], own.in_place(), [9])  # was never begun
    before = peer.pool.memory.clone()
    closing = pages.close()
    assert (write.done, closing.done, peer.revoked()) == (False, False, False)
    assert torch.equal(peer.pool.memory, before)
    queue.land()
    assert not peer.revoked(), "nobody has asked whether it is done"
    assert closing.done
    assert same(peer.pool, [4], own, [9])
    assert torch.equal(peer.pool.memory.view(PAGES, -1)[5], before.view(PAGES, -1)[5])
    assert peer.gpus.mappings == 0
    with pytest.raises(AssertionError, match="closed"):
        pages.write(0, 0, 1, own.view(0, 0, 1))
    assert peer.revoked()
    assert peer.shared.revoke(SESSION, 0), "for good"


def test_a_driver_gets_time_for_what_a_dead_process_has_queued(peer: Peer) -> None:
    assert not peer.shared.revoke(SESSION, 0)
    peer.clock.now += TEARDOWN_S / 2
    assert not peer.shared.revoke(SESSION, 0)
    peer.clock.now += TEARDOWN_S
    assert peer.shared.revoke(SESSION, 0)


def test_a_right_that_was_taken_back_is_not_given_again(peer: Peer, own: KVPool) -> None:
    assert peer.revoked()
    with pytest.raises(ValueError, match="ended the session"):
        peer.opened(own)
    assert peer.opened(own, session="u" * 32).close().done
    assert peer.revoked(stage=1), "every stage has a right of its own"


def _rewrite(path: Path, **changes: Any) -> None:
    handle, offset, size = struct.unpack("<64sQQ", path.read_bytes())
    fields = {"handle": handle, "offset": offset, "size": size} | changes
    path.write_bytes(struct.pack("<64sQQ", *fields.values()))


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda path: path.unlink(), "No such file"),
    (
        "another handle",
        lambda path: _rewrite(path, handle=b"\1" * 64),
        "cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE",
    ),
    ("another pool's", lambda path: _rewrite(path, size=7), "has 7 bytes and not"),
    ("too small", lambda path: os.truncate(path, 79), "has 79 bytes and not 80"),
    ("open to all", lambda path: path.chmod(0o666), "open to other users"),
]
if os.geteuid() == 0:
    SPOILED.append(("another user's", lambda path: os.chown(path, 12345, -1), "another user"))


@pytest.mark.parametrize(("spoil", "says"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_only_what_its_owner_has_exported_is_mapped(
    peer: Peer, own: KVPool, spoil: Callable[[Path], object], says: str
) -> None:
    spoil(peer.path)
    with pytest.raises((OSError, ValueError), match=says):
        peer.opened(own)
    assert peer.gpus.mappings == 0
    assert peer.revoked(), "a process that could not map it has no right to write"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pages": PAGES + 1}, "do not lie within"),
        ({"offset": 2}, "do not lie within"),
        ({"strides": (768, 256, 128, 64, 7)}, "divides elements of 2 bytes"),
        ({"strides": (768, 256, 128, 0, 8)}, "different parts in one place"),
    ],
)
def test_pages_that_a_gpu_could_not_write_are_not_mapped(
    peer: Peer, own: KVPool, changes: dict[str, Any], says: str
) -> None:
    peer.memory = replace(peer.memory, **changes)
    with pytest.raises(ValueError, match=says):
        peer.opened(own)
    assert peer.gpus.mappings == 0
    assert peer.revoked()


WRITER = """
import sys, msgspec
from headrace.core.types.kv.backends import CudaIpcMemory
from tests.engine.kv.fake_cuda import FakeGpus, opened
from tests.engine.kv.test_cuda_ipc import GEOMETRY, PAGES, SESSION
gpus = FakeGpus(sys.argv[1])
own = gpus.pool(GEOMETRY, PAGES)
pages = opened(gpus, own, GEOMETRY, msgspec.json.decode(sys.argv[2], type=CudaIpcMemory), SESSION)
print("mapped", flush=True)
number = 0
while True:
    number = number % 250 + 1
    own.memory.fill_(number)
    pages.write_pages(range(PAGES), own.in_place(), range(PAGES))
    pages.flush()
"""

OWNER = """
import sys, time, msgspec
from tests.engine.kv.fake_cuda import FakeGpus, share
from tests.engine.kv.test_cuda_ipc import GEOMETRY, PAGES
gpus = FakeGpus(sys.argv[1])
shared = share(gpus, gpus.pool(GEOMETRY, PAGES), time.monotonic)
print(msgspec.json.encode(shared.memory).decode(), flush=True)
time.sleep(60)
"""


def changes(pool: KVPool) -> bool:
    """Whether any process writes into the pool within a fifth of a second."""
    before = pool.memory.clone()
    signal.sigtimedwait([], 0.2)
    return not torch.equal(pool.memory, before)


def test_a_stopped_writer_keeps_its_right_and_a_killed_one_loses_it(peer: Peer) -> None:
    """Of another process. The pages of a silent one stay where they are: it does go on."""
    writer = child(WRITER, peer.gpus.library, msgspec.json.encode(peer.memory).decode())
    try:
        assert line_of(writer) == "mapped"
        assert changes(peer.pool)
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        assert not changes(peer.pool)
        assert not peer.revoked(), "it is silent, not dead"
        writer.send_signal(signal.SIGCONT)
        assert changes(peer.pool), "and it does write again"
        assert not peer.revoked()
    finally:
        writer.kill()
        writer.communicate()
    assert not peer.shared.revoke(SESSION, 0), "the driver may not be through with it yet"
    assert peer.revoked()
    assert not changes(peer.pool)


def test_a_pool_whose_owner_has_ended_is_not_mapped(gpus: FakeGpus, own: KVPool) -> None:
    owner = child(OWNER, gpus.library)
    try:
        memory = msgspec.json.decode(line_of(owner), type=CudaIpcMemory)
        pages = opened(gpus, own, GEOMETRY, memory, SESSION)
    finally:
        owner.kill()
        owner.communicate()
    with pytest.raises(ValueError, match="has no owner"):
        opened(gpus, own, GEOMETRY, memory, "u" * 32)
    assert pages.close().done
    assert not (FOLDER / memory.name).exists(), "the last one to let go removes it"


class Handoff(Pair):
    """Both sides, with real sockets."""

    def __init__(self, context: Any, peer: Peer, own: KVPool, queue: Queue) -> None:
        transport = CudaIpcTransport(own, peer.gpus.ipc(), queue)
        pools: dict[str, Any] = {"store": own, "target": peer.pool, "registered_pools": {CUDA_IPC: peer.shared}}
        memory = PoolMemory(cuda_ipc=peer.memory)
        config = replace(CONFIG, backends=(CUDA_IPC, ZMQ))
        super().__init__(
            context, own.geometry, peer.pool.geometry, config=config, backend=CUDA_IPC, memory=memory,
            transports={CUDA_IPC: transport}, **pools,
        )  # fmt: skip
        self.loop.until(lambda: value(self.receiver.statistics(), "data_connections") == 1)
        self.expect(1, range(4), 0, 32)
        self.send(1, 0, 0, 32, pages=range(8, 12), dst_pages=range(4), last=True)

    def turns(self) -> None:
        for _ in range(5):
            self.loop.turn(0.01)


@pytest.fixture
def context() -> Iterator[Any]:
    with zmq_context() as made:
        yield made


def test_a_chunk_is_announced_when_it_is_there_without_a_checksum(
    context: Any, peer: Peer, own: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("read by the processor")

    monkeypatch.setattr(OnGpu, "read", refuse)
    queue = Queue(slow=True)
    pair = Handoff(context, peer, own, queue)
    pair.loop.until(lambda: queue.left)
    pair.turns()
    assert not pair.loop.of(pair.receiver, KvReceived)
    queue.land()
    pair.loop.wait_for(pair.receiver, KvReceived)
    assert same(peer.pool, range(4), own, range(8, 12))
    assert value(pair.receiver.statistics(), "bytes_received_total", (CUDA_IPC,)) == 4 * GEOMETRY.page_bytes
    pair.close()


def test_nothing_of_an_ended_session_is_quiet_before_the_last_copy(context: Any, peer: Peer, own: KVPool) -> None:
    queue = Queue(slow=True)
    pair = Handoff(context, peer, own, queue)
    pair.loop.until(lambda: queue.left)
    pair.loop.apply(pair.sender, DropPeer(seq=0, session=pair.session))
    pair.loop.apply(pair.sender, CancelSend(seq=0, request=1))
    pair.turns()
    assert not pair.loop.of(pair.sender, SendCancelled)
    queue.land()
    pair.loop.wait_for(pair.sender, SendCancelled)
    pair.close()


def test_the_sender_lets_go_behind_the_last_copy_of_an_ended_session(context: Any, peer: Peer, own: KVPool) -> None:
    """Although nothing else is left for it to do."""
    queue = Queue(slow=True)
    pair = Handoff(context, peer, own, queue)
    pair.loop.until(lambda: queue.left)
    pair.loop.apply(pair.sender, DropPeer(seq=0, session=pair.session))
    pair.turns()
    assert pair.sender.next_deadline() is not None
    assert not peer.shared.revoke(pair.session, 0)
    queue.land()
    pair.loop.until(lambda: not peer.gpus.mappings)
    assert peer.revoked()
    assert pair.sender.next_deadline() is None
    pair.close()


def test_kv_comes_in_frames_where_the_pool_cannot_be_mapped(
    context: Any, peer: Peer, own: KVPool, caplog: pytest.LogCaptureFixture
) -> None:
    _rewrite(peer.path, handle=b"\1" * 64)
    with caplog.at_level(logging.WARNING):
        pair = Handoff(context, peer, own, Queue())
        pair.loop.wait_for(pair.receiver, KvReceived)
    assert same(peer.pool, range(4), own, range(8, 12))
    assert "in frames: its pool cannot be opened by cuda_ipc: cuIpcOpenMemHandle_v2" in caplog.text
    assert value(pair.sender.statistics(), "bytes_sent_total", (ZMQ,)) == 4 * GEOMETRY.page_bytes
    pair.close()


def test_the_driver_names_gpus_and_those_that_one_does_not_reach(gpus: FakeGpus) -> None:
    ipc = gpus.ipc()
    assert ipc.gpu(2) == "GPU-00000000-0000-0000-0000-000000000002"
    assert ipc.unreachable(0) == ()
    gpus.set("peers", 0)
    assert ipc.unreachable(1) == (ipc.gpu(0), ipc.gpu(2))


def test_memory_without_a_handle_is_a_clear_error(gpus: FakeGpus) -> None:
    ipc, memory = gpus.ipc(), gpus.allocate(4096)
    assert ipc.export(memory).offset == 512
    for wrong in (memory._replace(nbytes=4097), DeviceMemory(4096, 1, 0)):
        with pytest.raises(OSError, match="expandable segments"):
            ipc.export(wrong)
    gpus.set("expandable", 1)
    with pytest.raises(OSError, match=r"^cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE; .* PYTORCH_CUDA_ALLOC_CONF"):
        ipc.export(memory)
    with pytest.raises(OSError, match="cannot open shared object"):
        CudaIpc("libno-driver.so.1")


STAGE = StageConfig(
    rank=0,
    endpoint="",
    model=ModelConfig(device="cuda"),
    engine=EngineConfig(),
    transfer=TransferConfig(),
    role="decode",
)


def test_a_decode_stage_shares_its_pool_and_a_prefill_stage_writes_there(
    gpus: FakeGpus, own: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.engine.kv.cuda_ipc_pages.StreamQueue", lambda _: Queue())
    gpus.set("peers", 0)
    decode, prefill = (KvMemory(replace(STAGE, role=role), gpus.library) for role in ("decode", "prefill"))
    pool = gpus.pool(GEOMETRY, PAGES)
    assert decode.backends == (ZMQ,), "it has no pool yet"
    decode.register(pool)
    prefill.register(own)
    assert (decode.backends, prefill.backends) == ((CUDA_IPC, ZMQ), (CUDA_IPC, SHM, ZMQ))
    assert (decode.unreachable_gpus, len(prefill.unreachable_gpus)) == ((), 2)
    assert decode.pool_memory is not None
    pages = prefill.transports[CUDA_IPC].open(SESSION, 0, GEOMETRY, decode.pool_memory)
    pages.write_pages([1], own.in_place(), [2])
    pages.flush()
    assert same(pool, [1], own, [2])
    assert pages.close().done
    [path] = [each for each in FOLDER.iterdir() if each.name == decode.pool_memory.cuda_ipc.name]  # type: ignore[union-attr]
    decode.close()
    assert not path.exists()


@pytest.mark.parametrize("expandable", [True, False])
def test_a_pool_that_cannot_be_shared_is_left_out_and_the_log_says_so(
    gpus: FakeGpus, own: KVPool, caplog: pytest.LogCaptureFixture, expandable: bool
) -> None:
    gpus.set("expandable", 1)
    memory = KvMemory(STAGE, gpus.library if expandable else "libno-driver.so.1")
    before = set(FOLDER.iterdir())
    with caplog.at_level(logging.WARNING):
        memory.register(own)
    assert (memory.backends, memory.pool_memory, memory.registered_pools) == ((ZMQ,), None, {})
    assert "the KV pool cannot be shared between GPUs of this host (cuda_ipc): " in caplog.text
    assert ("PYTORCH_CUDA_ALLOC_CONF" in caplog.text) == expandable
    assert set(FOLDER.iterdir()) == before


def test_pools_in_host_memory_are_not_shared_so() -> None:
    memory = KvMemory(replace(STAGE, model=ModelConfig(device="cpu")), "libno-driver.so.1")
    memory.register(KVPool(GEOMETRY, 5))
    assert CUDA_IPC not in memory.backends
