"""Pages that go to a tier and come back: a gather or scatter, a copy and an event for each chunk, and no other wait."""

import pytest

from headrace.core.messages.orders import LoadPages, StorePages
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.core.types.kv.kv_tiers import HOST
from headrace.core.types.packed import pack
from headrace.engine.kv.device_pages import BLOCK_BYTES, DevicePages
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.copier import Copier, CopyEvent, CopyOrder
from headrace.engine.kv.tiers.host_store import HostStore
from headrace.engine.kv.tiers.pages import PINNED_CHUNKS, DevicePoolPages, pool_pages
from tests.engine.cuda.fake_gpu import Counts, FakeGpu

LLAMA_8B = Geometry("bfloat16", 32, 8, 128, 16)  # pages of 2 MiB
SHARD = Geometry("bfloat16", 32, 1, 128, 16)  # of eight: 256 KiB
LATENT = Component("index", "bfloat16", layers=61, kv_heads=1, head_dim=128, planes=1)
DEEPSEEK = Geometry("bfloat16", 61, 1, 576, 16, components=(LATENT,))
ORDER = 256  # pages of an order of the scheduler
PAGES = pack(range(ORDER))


def device_pages(gpu: FakeGpu, geometry: Geometry) -> DevicePoolPages:
    """Of a pool of as many pages as an order has."""
    made = pool_pages(KVPool(geometry, ORDER, "cuda:0"))
    assert isinstance(made, DevicePoolPages)
    gpu.divide(made._pages._blocks._memory, BLOCK_BYTES)
    return made


def copied(gpu: FakeGpu, geometry: Geometry, *orders: CopyOrder) -> Counts:
    """What the last of these orders takes, which this thread executes as the copy thread."""
    left = list(orders)

    def go_on(_: CopyEvent | None = None) -> None:
        if not left:
            copier.close()
            return
        copier.submit(left.pop(0))
        gpu.counts = Counts()

    pages = device_pages(gpu, geometry)
    copier = Copier(0, pages, host=HostStore(ORDER, geometry.page_bytes), disk=None, report=go_on)
    with gpu.counted():
        go_on()
        copier.run()
        return gpu.counts


@pytest.mark.parametrize("geometry", [LLAMA_8B, SHARD, DEEPSEEK])
def test_an_order_to_store_many_pages(gpu: FakeGpu, geometry: Geometry) -> None:
    size, in_chunk = ORDER * geometry.page_bytes, BLOCK_BYTES // geometry.page_bytes
    chunks = -(-ORDER // in_chunk)
    with gpu:
        counts = copied(gpu, geometry, StorePages(seq=1, tier=HOST, sources=PAGES, slots=PAGES))
    assert size <= counts.copied["d2h pinned"] <= 1.05 * size
    assert counts.operations() == {
        "index_select": chunks * len(geometry.tensors),
        "copy d2h pinned": chunks,
        "copy h2d pinned": chunks,  # page numbers
    }
    assert {why for why, _ in counts.syncs} == {"event.synchronize"}
    assert counts.syncs.total() == chunks, "of the copy thread, for each chunk, while the next one is under way"


@pytest.mark.parametrize("geometry", [LLAMA_8B, SHARD, DEEPSEEK])
def test_an_order_to_load_many_pages(gpu: FakeGpu, geometry: Geometry) -> None:
    size, in_chunk = ORDER * geometry.page_bytes, BLOCK_BYTES // geometry.page_bytes
    chunks = -(-ORDER // in_chunk)
    store = StorePages(seq=1, tier=HOST, sources=PAGES, slots=PAGES)
    with gpu:
        counts = copied(gpu, geometry, store, LoadPages(seq=2, tier=HOST, slots=PAGES, pages=PAGES))
    assert size <= counts.copied["h2d pinned"] <= 1.05 * size
    assert counts.operations() == {"copy h2d pinned": 2 * chunks, "index_copy_": chunks * len(geometry.tensors)}
    assert counts.syncs.total() == 1, "of the copy thread, for the last chunk"


def test_handoffs_have_pinned_memory_of_their_own(gpu: FakeGpu) -> None:
    with gpu:
        pages = device_pages(gpu, LLAMA_8B)
        handoff = DevicePages(KVPool(LLAMA_8B, 8, "cuda:0"), 4 * BLOCK_BYTES)
        free = [(pages._pages._blocks.free, handoff._blocks.free) for _ in pages.read(range(ORDER))]
    assert {own for own, _ in free} < set(range(PINNED_CHUNKS))
    assert {theirs for _, theirs in free} == {4}
