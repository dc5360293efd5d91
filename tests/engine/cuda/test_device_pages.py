"""KV that leaves a GPU, and comes there: a chunk takes few launches and no wait, and is the same bytes."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.kv import device_pages, pinned_blocks
from headrace.engine.kv.device_pages import DevicePages, Packing, pinned_bytes
from headrace.engine.kv.pool import KVPool
from headrace.transfer.data.payload import Passage, frames, pieces, write_frames
from headrace.transfer.protocol.layout import STATE, Box, copies
from headrace.transfer.protocol.page_store import PageSlice
from tests.engine.cuda.fake_gpu import FakeGpu
from tests.engine.kv.stand_in_device import Device

LLAMA_8B = Geometry("bfloat16", 32, 8, 128, 16)
CHUNK = 2048
GATHERED = 16 << 20


@pytest.mark.parametrize("start", [0, 2048, 2055])
def test_a_chunk_leaves_in_blocks_without_a_wait(gpu: FakeGpu, start: int) -> None:
    size = CHUNK * LLAMA_8B.token_bytes
    passage = Passage(LLAMA_8B, LLAMA_8B, start, CHUNK)
    own = list(range(1000, 1000 + CHUNK // 16 + 1))
    with gpu:
        pool = KVPool(LLAMA_8B, 4096, "cuda:0")
        pages = DevicePages(pool, pinned_bytes(LLAMA_8B, CHUNK))
        with gpu.counted() as counts:
            read = pages.begin_read(pieces(passage, own))
        assert read is not None
        assert read.done
    assert not counts.syncs
    assert size <= counts.copied["d2h pinned"] <= 1.05 * size
    gathers, copied = counts.operations()["index_select"], counts.operations()["copy d2h pinned"]
    assert copied == -(-size // GATHERED) + (start % 16 > 0)
    assert gathers <= copied + 2, "one more for what is left at each end"
    assert counts.launches.total() == gathers + copied + 1, "and the page numbers"


def test_a_chunk_comes_in_blocks_without_a_wait(gpu: FakeGpu) -> None:
    passage = Passage(LLAMA_8B, LLAMA_8B, 0, CHUNK)
    size = CHUNK * LLAMA_8B.token_bytes
    payload = [memoryview(bytes(LLAMA_8B.page_bytes)) for _ in range(CHUNK // 16)]
    with gpu:
        pages = DevicePages(KVPool(LLAMA_8B, 4096, "cuda:0"), pinned_bytes(LLAMA_8B, CHUNK))
        with gpu.counted() as counts:
            write = write_frames(pages, copies(*passage), list(range(128)), payload)
        assert write.done
    assert not counts.syncs
    assert size <= counts.copied["h2d pinned"] <= 1.05 * size
    assert counts.operations()["index_copy_"] == size // GATHERED
    assert counts.launches.total() == 3 * size // GATHERED, "the page numbers of each"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    monkeypatch.setattr(device_pages, "BLOCK_BYTES", 1)  # a block holds the largest page
    return Device.patched(monkeypatch)


RING = Component("ring", "float32", 2, 2, 3, 2, per_request=True, window=4)
LATENT = Component("latent", "bfloat16", 3, 1, 7, 1)
PACKED = {"kv": 4, "latent": 7, "index": 1}  # bytes of a slot
GEOMETRIES = [
    Geometry("bfloat16", 2, 2, 4, 4),
    Geometry("float32", 3, 1, 2, 1),
    Geometry("bfloat16", 2, 2, 4, 4, components=(LATENT, RING)),
]


def filled(geometry: Geometry, seed: int) -> KVPool:
    pool = KVPool(geometry, 9)
    for tensor in pool.tensors.values():
        random = torch.Generator().manual_seed(seed)
        tensor.copy_(torch.randn(tensor.shape, generator=random))
    return pool


@pytest.mark.usefixtures("device")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_frames_are_those_of_a_pool_in_host_memory(data: st.DataObject) -> None:
    geometry = data.draw(st.sampled_from(GEOMETRIES))
    size = geometry.page_size
    start, count = data.draw(st.integers(0, 2 * size)), data.draw(st.integers(0, 6 * size))
    passage = Passage(geometry, geometry, start, count, data.draw(st.booleans()))
    numbers = [*data.draw(st.permutations(range(9))), 3]
    source, target, expected = (filled(geometry, seed) for seed in (1, 2, 2))
    read = DevicePages(source, 1 << 20).begin_read(pieces(passage, numbers))
    assert read is not None
    sent = frames(read.pages, passage, numbers)
    same = frames(source, passage, numbers)
    assert [frame.tobytes() for frame in sent] == [frame.tobytes() for frame in same]
    theirs = [*reversed(numbers[:-1]), 5]
    for pool, store in ((expected, expected), (target, DevicePages(target, 1 << 12))):
        assert write_frames(store, copies(*passage), theirs, [frame.data for frame in same]).done
        assert pool is expected or all(torch.equal(pool.tensors[name], expected.tensors[name]) for name in pool.tensors)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_lie_apart_in_blocks_and_are_found_again(data: st.DataObject) -> None:
    tensors = {name: torch.empty(20, 1, 1, 1, 8, width, dtype=torch.uint8) for name, width in PACKED.items()}
    whole = [Box(slice(None), slice(None), name) for name in tensors]
    piece = st.builds(PageSlice, st.integers(0, 19), st.sampled_from((0, 2)), st.integers(1, 6), st.sampled_from(whole))
    packing, added = Packing(tensors, 256), []
    for each in data.draw(st.lists(piece, max_size=60)):
        run = packing.add(each)
        added.append((run.block, run.place(len(run.pieces) - 1), each))
    found = [(run.block, run.place(index), each) for run in packing.runs for index, each in enumerate(run.pieces)]
    assert sorted(found, key=str) == sorted(added, key=str)
    places = sorted((block, place.start, place.stop) for block, place, _ in added)
    assert all(stop <= 256 for _, _, stop in places)
    assert all(after[0] > block or after[1] >= stop for (block, _, stop), after in pairwise(places))
    assert all(place.stop - place.start == each.slots * PACKED[each.box.tensor] for _, place, each in added)
    assert [run.block for run in packing.runs] == sorted(run.block for run in packing.runs)


def test_tensors_that_take_turns_are_a_run_each() -> None:
    tensors = {name: torch.empty(20, 1, 1, 1, 8, width, dtype=torch.uint8) for name, width in PACKED.items()}
    packing = Packing(tensors, 4096)
    for page in range(20):
        for name in tensors:
            packing.add(PageSlice(page, 0, 8, Box(slice(None), slice(None), name)))
    assert [len(run.pieces) for run in packing.runs] == [20] * len(PACKED)


def test_parts_of_a_piece_are_found(device: Device) -> None:
    pool = filled(GEOMETRIES[2], 1)
    read = DevicePages(pool, 1 << 20).begin_read([PageSlice(4, 1, 3)])
    assert read is not None
    assert np.array_equal(read.pages.view(4, 2, 2), pool.view(4, 2, 2))
    assert STATE not in [page for _, page in read._at]


def test_blocks_are_free_when_nothing_refers_to_their_frames(device: Device) -> None:
    pages = DevicePages(filled(GEOMETRIES[0], 1), 4 * 4096)
    piece = [PageSlice(1, 0, 4)]
    device.finished = False
    read = pages.begin_read(piece)
    assert read is not None
    assert not read.done
    device.finished = True
    assert read.done
    frame = read.pages.read(1, 0, 4).reshape(-1)
    del read
    assert pages._blocks.free == 3
    del frame
    assert pages._blocks.free == 4


def test_a_peer_that_holds_much_leaves_room_for_others(device: Device) -> None:
    pages = DevicePages(filled(GEOMETRIES[0], 1), 4 * 4096)
    held = [pages.begin_read([PageSlice(1, 0, 4)], held) for held in (0, 4096, 2 * 4096)]
    assert [read is None for read in held] == [False, False, True]
    assert pages.begin_read([PageSlice(2, 0, 4)]) is not None
    one_too_many = [PageSlice(page, 0, 4) for page in range(5) for _ in range(16)]
    assert pages.begin_read(one_too_many, held=4096) is None
    assert pages.begin_read(one_too_many) is not None, "in memory of its own"


def test_writes_wait_for_those_before_them_when_all_blocks_are_in_use(device: Device) -> None:
    pool = filled(GEOMETRIES[0], 1)
    pages = DevicePages(pool, 2 * 4096)
    device.finished = False
    data = np.ones((2, 2, 2, 4, 8), np.uint8)
    for page in range(3):
        pages.write(page, 0, 4, data * page)
        last = pages.flush()
    assert device.waits == 1
    assert not last.done
    device.finished = True
    assert last.done
    assert [int(pool.view(page, 0, 4)[0, 0, 0, 0, 0]) for page in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("piece", [PageSlice(9, 0, 4), PageSlice(0, 3, 2), PageSlice(-1, 0, 1)])
def test_nothing_outside_the_pool_is_touched(device: Device, piece: PageSlice) -> None:
    pages = DevicePages(filled(GEOMETRIES[0], 1), 4096)
    with pytest.raises(IndexError, match="outside"):
        pages.begin_read([piece])
    with pytest.raises(IndexError, match="outside"):
        pages.write(*piece[:3], np.zeros(1, np.uint8))
    assert pages.flush().done


def test_pinned_memory_that_is_refused_is_a_clear_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(pinned_blocks, "_pinned", refuse)
    with pytest.raises(ConfigError, match=r"^512 MiB of pinned host memory.*out of memory; write a smaller --chunk"):
        DevicePages(filled(GEOMETRIES[0], 1), 512 << 20)
