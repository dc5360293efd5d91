"""Pages of a pool as the copier sees them: in place on the CPU, chunk by chunk where the pool is on a device."""

from collections.abc import Callable, Generator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.types.kv.geometry import Component, Geometry
from headrace.engine.kv import device_pages
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers import pages as pages_module
from headrace.engine.kv.tiers.pages import DevicePoolPages, HostPoolPages, PoolPages
from tests.engine.kv.stand_in_device import Device

GEOMETRY = Geometry("bfloat16", layers=3, kv_heads=2, head_dim=4, page_size=8)
LATENT = Component("latent", "float32", layers=2, kv_heads=1, head_dim=3, planes=1)
STATE = Component("state", "float32", layers=2, kv_heads=1, head_dim=5, planes=1, per_request=True)
LARGE = Component("large", "float32", layers=40, kv_heads=1, head_dim=3, planes=1)
GEOMETRIES = [GEOMETRY, *(Geometry("bfloat16", 3, 2, 4, 8, components=each) for each in ((LATENT, STATE), (LARGE,)))]
PAGES = 12
KINDS: list[Callable[[KVPool], PoolPages]] = [HostPoolPages, DevicePoolPages]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device.patched(monkeypatch)
    for module in (pages_module, device_pages):
        monkeypatch.setattr(module, "BLOCK_BYTES", 3 * GEOMETRY.page_bytes + 64)  # three pages to a chunk
    return made


def filled(geometry: Geometry, seed: int) -> KVPool:
    pool = KVPool(geometry, PAGES)
    pool.memory.copy_(torch.randint(0, 256, pool.memory.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def of_page(pool: KVPool, page: int) -> bytes:
    """All that belongs to a page, tensor by tensor."""
    paged = [each.name for each in pool.geometry.tensors if not each.per_request]
    return b"".join(pool.tensors[name][page].contiguous().view(torch.uint8).numpy().tobytes() for name in paged)


@pytest.mark.usefixtures("device")
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pages_are_all_of_their_bytes_and_no_others(data: st.DataObject) -> None:
    geometry = data.draw(st.sampled_from(GEOMETRIES))  # pages of the last one take a block for each tensor
    kind = data.draw(st.sampled_from(KINDS))
    sources = data.draw(st.lists(st.integers(0, PAGES - 1), unique=True))
    targets = data.draw(st.permutations(range(PAGES)))[: len(sources)]
    pool, other = filled(geometry, 1), filled(geometry, 2)
    before = [of_page(other, page) for page in range(PAGES)]
    states = {each.name: other.tensors[each.name].clone() for each in geometry.tensors if each.per_request}
    reading, writing = kind(pool), kind(other)
    assert reading.page_bytes == geometry.page_bytes
    stored = [b"".join(part.tobytes() for part in page) for page in reading.read(sources)]
    assert stored == [of_page(pool, page) for page in sources]
    for page, bytes_ in zip(targets, stored, strict=True):
        buffer = np.frombuffer(bytes_, np.uint8).copy()
        writing.write(page, buffer)
        buffer[:] = 0  # it may change as soon as write() has returned
    writing.flush()
    written = dict(zip(targets, stored, strict=True))
    assert [of_page(other, page) for page in range(PAGES)] == [written.get(page, before[page]) for page in range(PAGES)]
    assert all(torch.equal(other.tensors[name], state) for name, state in states.items())


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [-1, PAGES])
def test_pages_outside_the_pool_are_refused(kind: Callable[[KVPool], PoolPages], page: int) -> None:
    pages = kind(filled(GEOMETRY, 1))
    with pytest.raises(IndexError, match=f"page {page} is outside the pool of {PAGES}"):
        list(pages.read([0, page]))
    with pytest.raises(IndexError, match=f"page {page} is outside the pool of {PAGES}"):
        pages.write(page, np.zeros(GEOMETRY.page_bytes, np.uint8))


def test_a_chunk_is_read_while_the_one_before_it_is_stored(device: Device) -> None:
    pages = DevicePoolPages(filled(GEOMETRY, 1))
    reading = pages.read(range(10))
    assert device.events == 0, "nothing is read before it is wanted"
    next(reading)
    assert (device.events, device.waits) == (2, 1)
    assert sum(1 for _ in reading) == 9
    assert (device.events, device.waits) == (4, 4), "ten pages are four chunks"


def test_what_is_given_up_is_waited_for(device: Device) -> None:
    pages = DevicePoolPages(filled(GEOMETRY, 1))
    reading = pages.read(range(10))
    next(reading)
    assert isinstance(reading, Generator)
    reading.close()
    assert (device.events, device.waits) == (2, 2)
    assert pages._pages._blocks.free == len(pages._pages._blocks._memory), "the blocks may be used again"


def test_loads_between_stored_pages_find_pinned_memory(device: Device) -> None:
    """As the copier does: a load overtakes the store whose chunks are under way."""
    pool = filled(GEOMETRY, 1)
    wanted = [of_page(pool, page) for page in range(PAGES)]
    pages = DevicePoolPages(pool)
    stored = []
    for page in pages.read(range(PAGES - 1)):
        stored.append(b"".join(part.tobytes() for part in page))
        for _ in range(9):
            pages.write(PAGES - 1, np.full(GEOMETRY.page_bytes, len(stored), np.uint8))
        pages.flush()
        assert of_page(pool, PAGES - 1) == bytes([len(stored)]) * GEOMETRY.page_bytes
    assert stored == wanted[:-1]
