"""KV that goes from GPU to GPU: a chunk takes few launches and no wait, in the order that the memory of both needs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import asdict

from headrace.core.types.kv.backends import CudaIpcMemory, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv import cuda_ipc_pages
from headrace.engine.kv.cuda_ipc_pages import CudaIpcPages, CudaIpcTransport
from headrace.engine.kv.pool import KVPool
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import StridedPool, c_order
from headrace.transfer.data.payload import Passage, write_through
from tests.engine.cuda.fake_gpu import FakeGpu

LLAMA_8B = Geometry("bfloat16", 32, 8, 128, 16)
SMALL_PAGES = Geometry("bfloat16", 32, 8, 128, 8)
CHUNK = 2048
BLOCK = 16 << 20
ADDRESS = 1 << 52  # of a GPU's memory, which is not mapped here: who reads there is killed


class Mapped:
    """A MappedPool."""

    address = ADDRESS

    def __init__(self, *_: object) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Writer:
    """A stage's pool, and a peer's that it has mapped."""

    def __init__(self, gpu: FakeGpu, geometry: Geometry) -> None:
        layout, own = c_order(geometry, 4096 * 16 // geometry.page_size), c_order(LLAMA_8B, 4096)
        memory = CudaIpcMemory(host="h", name="n", device="GPU-1", **asdict(layout))
        self.geometry = geometry
        self.pool = KVPool(LLAMA_8B, 4096, "cuda:0")
        gpu.divide(self.pool.memory, LLAMA_8B.page_bytes)
        self.source = StridedPool(LLAMA_8B, own, DeviceMemory(ADDRESS, own.bytes, 0).array())
        self.pages: CudaIpcPages = CudaIpcTransport(self.pool, None).open(  # type: ignore[arg-type]
            "s", 0, geometry, PoolMemory(cuda_ipc=memory)
        )

    def start(self, first: int = 0) -> Any:
        """A chunk whose pages here are 100 and the following ones."""
        size = self.geometry.page_size
        own, theirs = list(range(100, 101 + CHUNK // 16)), list(range(1 + CHUNK // size))
        write_through(self.source, self.pages, Passage(LLAMA_8B, self.geometry, first, CHUNK), own, theirs, None)
        return self.pages.flush()


@pytest.fixture
def writer(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> Callable[[Geometry], Writer]:
    def tensor_at(address: int, size: int, device: torch.device) -> torch.Tensor:
        assert address == ADDRESS
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(cuda_ipc_pages, "MappedPool", Mapped)
    monkeypatch.setattr(cuda_ipc_pages, "tensor_at", tensor_at)
    monkeypatch.setattr(cuda_ipc_pages, "device_memory", lambda pool: DeviceMemory(ADDRESS, pool.memory.nbytes, 0))
    return lambda geometry: Writer(gpu, geometry)


@pytest.mark.parametrize(("geometry", "first"), [(LLAMA_8B, 0), (LLAMA_8B, 7), (SMALL_PAGES, 0), (SMALL_PAGES, 5)])
def test_a_chunk_is_written_in_blocks_without_a_wait(
    gpu: FakeGpu, writer: Callable[[Geometry], Writer], geometry: Geometry, first: int
) -> None:
    size = CHUNK * LLAMA_8B.token_bytes
    with gpu:
        made = writer(geometry)
        with gpu.counted() as counts:
            write = made.start(first)
        assert write.done
        assert made.pages.close().done
    gathers = counts.operations()["index_select"]
    assert not counts.syncs
    assert not counts.moved["copy_"], "no other pass over the bytes"
    assert counts.moved["index_select"] + counts.moved["index_copy_"] <= 4.1 * size
    assert gathers == counts.operations()["index_copy_"]
    assert size // BLOCK <= gathers <= size // BLOCK + 8, "one more for each kind of piece"
    assert counts.launches.total() == 2 * gathers + 1, "and the page numbers"


def test_a_page_is_computed_anew_when_its_write_is_known_to_be_done(
    gpu: FakeGpu, writer: Callable[[Geometry], Writer]
) -> None:
    with gpu:
        made = writer(LLAMA_8B)
        write = made.start()
        made.pool.tensor[90].zero_()  # a page that does not go
        assert not gpu.races
        assert write.done
        made.pool.tensor[100].zero_()
        assert not gpu.races


@pytest.mark.parametrize("early", ["read", "written"])
def test_what_comes_too_early_is_found(gpu: FakeGpu, writer: Callable[[Geometry], Writer], early: str) -> None:
    """A page that is sent before its plan is known to be done, or given away before its write is."""
    with gpu:
        made = writer(LLAMA_8B)
        if early == "read":
            made.pool.tensor[100].zero_()
        write = made.start()
        if early == "written":
            made.pool.tensor[100].zero_()
        assert [race.what for race in gpu.races] == ["read after write" if early == "read" else "write after read"]
        assert write.done
    gpu.races.clear()
