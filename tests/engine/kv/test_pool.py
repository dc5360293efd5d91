"""Pages in and out of the KV pool."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.pool import DevicePool, KVPool
from headrace.transfer.backends.strided_pool import c_order
from headrace.transfer.protocol.layout import Box

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_pool(dtype: str = "float32", pages: int = 5) -> KVPool:
    pool = KVPool(Geometry(dtype, layers=3, kv_heads=2, head_dim=4, page_size=8), pages)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(pool.tensor.shape) % 251)
    return pool


@pytest.mark.parametrize("dtype", DTYPES)
@given(page=st.integers(0, 4), first=st.integers(0, 7), data=st.data())
def test_slots_travel_between_pools(dtype: str, page: int, first: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8 - first))
    source, target = make_pool(dtype), make_pool(dtype)
    target.tensor.fill_(-1)
    payload = source.read(page, first, count)
    assert payload.dtype == np.uint8
    assert payload.shape == (3, 2, 2, count, 4 * source.geometry.item_bytes)
    assert payload.flags.c_contiguous
    assert payload.nbytes == count * source.geometry.token_bytes
    target.write(2, 8 - count, count, np.frombuffer(payload.tobytes(), np.uint8).reshape(payload.shape))
    moved = target.tensor[2, :, :, :, 8 - count :]
    assert torch.equal(moved, source.tensor[page, :, :, :, first : first + count])
    target.tensor[2, :, :, :, 8 - count :] = -1
    assert bool((target.tensor == -1).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_heads_of_some_layers_travel_alone(dtype: str) -> None:
    source, target = make_pool(dtype), make_pool(dtype)
    target.tensor.fill_(-1)
    payload = source.read(1, 2, 5, Box(slice(1, 3), slice(1, 2)))
    assert payload.shape == (2, 2, 1, 5, 4 * source.geometry.item_bytes)
    assert payload.flags.c_contiguous
    target.write(4, 0, 5, payload, Box(slice(0, 2), slice(0, 1)))
    moved = target.tensor[4, :2, :, :1, :5]
    assert torch.equal(moved, source.tensor[1, 1:, :, 1:, 2:7])
    target.tensor[4, :2, :, :1, :5] = -1
    assert bool((target.tensor == -1).all())


def test_a_full_page_is_not_copied() -> None:
    pool = make_pool()
    assert np.shares_memory(pool.read(1, 0, 8), pool.tensor.numpy())
    assert pool.read(1, 0, 8).nbytes == pool.geometry.page_bytes
    assert not np.shares_memory(pool.read(1, 0, 7), pool.tensor.numpy())


@pytest.mark.parametrize(("page", "first", "count"), [(-1, 0, 1), (5, 0, 1), (0, -1, 2), (0, 0, 0), (0, 4, 5)])
def test_nothing_outside_a_page_is_touched(page: int, first: int, count: int) -> None:
    pool = make_pool()
    with pytest.raises(IndexError, match="outside"):
        pool.read(page, first, count)
    with pytest.raises(IndexError, match="outside"):
        pool.write(page, first, count, np.zeros((3, 2, 2, max(count, 0), 16), np.uint8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_pages_of_a_gpu_come_and_go_on_a_stream_of_their_own() -> None:
    """While a long plan works; what is written is there for the next plan."""
    pool = KVPool(Geometry("bfloat16", 2, 2, 16, 4), 8, "cuda")
    pool.tensor.fill_(3.0)
    torch.cuda.synchronize()
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 64
    expected = torch.full((2, 2, 2, 4, 16), 3.0, dtype=torch.bfloat16)
    assert (pool.read(5, 0, 4) == expected.view(torch.uint8).numpy()).all()
    values = torch.randn(2, 2, 2, 3, 16).bfloat16()
    pool.write(6, 1, 3, values.view(torch.uint8).numpy())
    assert torch.equal(pool.tensor[6, :, :, :, 1:4].cpu(), values)


def test_a_gpu_without_room_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = Geometry("bfloat16", 2, 2, 16, 4)

    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(OSError, match="cuda:1 is out of memory") as raised:
        DevicePool(geometry, c_order(geometry, 3), "cuda:1")
    assert raised.value.strerror == "cuda:1 is out of memory"
