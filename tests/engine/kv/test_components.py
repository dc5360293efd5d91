"""Pools with a latent in place of keys and values, or with a component beside them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.types.kv.backends import PoolMemory
from headrace.core.types.kv.geometry import KV, Component, Geometry
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.disk_store import SEGMENT_BYTES, DiskStore
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import TierStore, pool_pages
from headrace.engine.kv.tiers.record import Origin
from headrace.transfer.backends.shm import SharedPool, ShmTransport
from headrace.transfer.backends.strided_pool import ArrayPageStore, c_order
from headrace.transfer.backends.writer_locks import host_token
from headrace.transfer.data.payload import Passage, frames, write_frames, write_through
from headrace.transfer.protocol.checksum import Digest
from headrace.transfer.protocol.layout import Box, copies, whole_pages

ALL = slice(None)
HEADER = PageHeader(bytes(32), bytes(32), bytes(32), 0)


def latent(layers: range, page_size: int = 8, dtype: str = "bfloat16") -> Geometry:
    part = Component("latent", dtype, len(layers), kv_heads=1, head_dim=20, planes=1, layer_start=layers.start)
    return Geometry(dtype, 0, 0, 0, page_size, components=(part,))


def beside(page_size: int = 8) -> Geometry:
    """Keys and values with a draft model's and with bytes of any meaning."""
    draft = Component("draft", "float32", layers=2, kv_heads=3, head_dim=6)
    tags = Component("tags", "uint8", layers=1, kv_heads=1, head_dim=3, planes=1)
    return Geometry("bfloat16", 3, 2, 4, page_size, components=(draft, tags))


def filled(geometry: Geometry, pages: int = 6, seed: int = 0) -> KVPool:
    pool = KVPool(geometry, pages)
    generator = torch.Generator().manual_seed(seed)
    for tensor in pool.tensors.values():
        tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator))
    return pool


def same(one: KVPool, other: KVPool) -> bool:
    return all(torch.equal(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def test_a_latent_is_the_pool_itself() -> None:
    """One plane, and whole pages as rows: the fast ways of keys and values."""
    pool = filled(latent(range(3)))
    assert pool.tensor.shape == (6, 3, 1, 1, 8, 20)
    assert list(pool.tensors) == ["latent"]
    assert pool.blocks_per_layer == 1
    assert pool.blocks_per_page == 3
    rows = pool.rows
    assert rows is not None
    assert rows.shape == (6, pool.geometry.page_bytes)
    whole = pool.read(4, 0, 8, Box(ALL, ALL, "latent"))
    assert np.shares_memory(whole, rows)
    assert whole.reshape(-1).tobytes() == rows[4].tobytes()
    with pytest.raises(KeyError, match=KV):
        pool.read(4, 0, 8)


@pytest.mark.parametrize("name", [KV, "draft", "tags"])
def test_slots_of_every_tensor_travel_and_leave_the_others_alone(name: str) -> None:
    geometry = beside()
    source, target = filled(geometry), filled(geometry, seed=1)
    before = filled(geometry, seed=1)
    part = next(each for each in geometry.tensors if each.name == name)
    box = Box(slice(0, part.layers), slice(0, part.kv_heads), name)
    data = source.read(2, 3, 4, box)
    assert data.shape == (part.layers, part.planes, part.kv_heads, 4, part.slot_bytes)
    assert np.array_equal(source.view(2, 3, 4, box), data)
    target.write(5, 1, 4, data, box)
    moved = target.tensors[name][5, :, :, :, 1:5]
    assert torch.equal(moved, source.tensors[name][2, :, :, :, 3:7])
    moved.copy_(before.tensors[name][5, :, :, :, 1:5])
    assert same(target, before)


def test_memory_is_laid_out_as_the_protocol_says() -> None:
    """Tensor after tensor in C order, so that what peers write by offsets arrives."""
    geometry = beside()
    memory = bytearray(6 * geometry.page_bytes)
    pool = KVPool(geometry, 6, allocate=lambda _, __: memoryview(memory))
    plain = ArrayPageStore(geometry, 6, memoryview(memory))
    source = filled(geometry)
    for name, tensor in source.tensors.items():
        pool.tensors[name].copy_(tensor)
        assert plain.tensors[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    assert pool.rows is None


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("start", "count"), [(0, 48), (5, 30), (7, 1)])
@pytest.mark.parametrize("size", [8, 4, 16, 5])
def test_a_latent_moves_between_page_sizes_and_stages(
    size: int, start: int, count: int, direct: bool, checksums: bool
) -> None:
    """From 4 layers in one pool to 1 and 3 in two, as frames and straight into the peer's memory."""
    source = filled(latent(range(4)), pages=8)
    ours = list(range(1, 8))
    page = -(-(start + count) // size)
    theirs = [page - index for index in range(page)]
    shift, source_shift = start // size, start // 8
    for layers in (range(1), range(1, 4)):
        target = filled(latent(layers, size), pages=page + 1, seed=1)
        expected = filled(latent(layers, size), pages=page + 1, seed=1)
        for position in range(start, start + count):
            slot = source.tensor[ours[position // 8], layers.start : layers.stop, :, :, position % 8]
            expected.tensor[theirs[position // size], :, :, :, position % size] = slot
        passage = Passage(source.geometry, target.geometry, start, count)
        if direct:
            digest = Digest() if checksums else None
            remote = Direct(target)
            write_through(source, remote, passage, ours[source_shift:], theirs[shift:], digest)
        else:
            sent = frames(source, passage, ours[source_shift:])
            assert sum(frame.nbytes for frame in sent) == count * target.geometry.token_bytes
            write_frames(target, copies(*passage), theirs[shift:], [frame.data for frame in sent])
        assert same(target, expected)


class Direct:
    """Pages that are written like a peer's."""

    def __init__(self, target: KVPool) -> None:
        self.write = target.write
        self._target = target

    def write_pages(self, pages: list[int], store: KVPool, own: list[int]) -> None:
        """Whole pages."""
        assert self._target.rows is not None
        assert store.rows is not None
        self._target.rows[pages] = store.rows[own]


@pytest.mark.skipif(not host_token(), reason="shared memory cannot be used here")
def test_whole_pages_of_a_latent_are_copied_as_rows_of_shared_memory() -> None:
    geometry = latent(range(2))
    assert whole_pages(geometry, geometry, 3, 30) == range(1, 4)
    assert whole_pages(beside(), beside(), 0, 16) == range(0)
    shared = SharedPool(c_order(geometry, 6))
    source = filled(geometry)
    target = KVPool(geometry, 6, allocate=lambda _, __: shared.buffer)
    target.tensor.zero_()
    remote = ShmTransport().open("session", 0, geometry, PoolMemory(shm=shared.memory))
    write_through(source, remote, Passage(geometry, geometry, 3, 30), [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], None)
    remote.close()
    for position in range(3, 33):
        page, slot = divmod(position, 8)
        assert torch.equal(target.tensor[5 - page, ..., slot, :], source.tensor[1 + page, ..., slot, :])
    assert not target.tensor[5, ..., :3, :].any()
    shared.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("geometry", [latent(range(3)), beside()], ids=["latent", "beside"])
def test_tiers_keep_pages_of_every_tensor(geometry: Geometry, kind: str, tmp_path: Path) -> None:
    pool = filled(geometry)
    before = filled(geometry)
    store: TierStore = HostStore(4, geometry.page_bytes)
    if kind == "disk":
        store = DiskStore(str(tmp_path), Origin("f", geometry), SEGMENT_BYTES)
    pages = pool_pages(pool)
    assert pages.page_bytes == geometry.page_bytes
    for slot, page in enumerate(pages.read((5, 0, 3))):
        assert store.put(slot, page, HEADER) >= geometry.page_bytes
    for tensor in pool.tensors.values():
        tensor[:] = 7
    for slot, page in ((2, 1), (0, 4)):
        pages.write(page, store.get(slot))
    pages.flush()
    for name, tensor in pool.tensors.items():
        assert torch.equal(tensor[1], before.tensors[name][3])
        assert torch.equal(tensor[4], before.tensors[name][5])
        assert bool((tensor[[0, 2, 3, 5]] == 7).all())
    store.close()
