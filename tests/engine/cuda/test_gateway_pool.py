"""A gateway's pool on a GPU: what is written and cleared there is done before an engine is told that it may read."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from headrace.core.types.kv.geometry import Geometry
from headrace.engine.kv.device_pages import BLOCK_BYTES, DeviceWrite
from headrace.gateway.vllm_nixl.kv_pool import vllm_layout
from headrace.transfer.backends.device_memory import DeviceMemory
from tests.engine.cuda.clocks import HOST
from tests.engine.cuda.fake_gpu import Event, FakeGpu
from tests.transfer.fake_nixl import Network

LLAMA_8B = Geometry("bfloat16", 32, 8, 128, 16)
PAGE = np.zeros((32, 2, 8, 16, 256), np.uint8)
PAGES = 64


@pytest.fixture
def make() -> Iterator[Callable[[], Any]]:
    with Network().imported("headrace.gateway.vllm.device_staging") as [module]:
        module.device_memory = lambda pool: DeviceMemory(1 << 52, pool.memory.nbytes, 0)
        yield lambda: module.DeviceStaging(LLAMA_8B, vllm_layout(LLAMA_8B, PAGES), "cuda:0", ())


def write(pool: Any, pages: range) -> Any:
    for page in pages:
        pool.write(page, 0, 16, PAGE)
    return pool.flush()


def offer(gpu: FakeGpu, pool: Any) -> None:
    """An engine reads all of it from now on, without an event of ours."""
    gpu.clocks.use(HOST, gpu._units(pool._pool.memory), (), "an engine's read")


def test_frames_go_there_by_chunk(gpu: FakeGpu, make: Callable[[], Any]) -> None:
    size = PAGES * LLAMA_8B.page_bytes
    with gpu:
        pool = make()
        gpu.divide(pool._blocks._memory, BLOCK_BYTES)
        with gpu.counted() as counts:
            written = write(pool, range(PAGES))
        assert written.done
        offer(gpu, pool)
    assert not counts.syncs
    assert size <= counts.copied["h2d pinned"] <= 1.05 * size
    assert counts.operations() == {"index_copy_": size // BLOCK_BYTES, "copy h2d pinned": 2 * size // BLOCK_BYTES}


def test_the_rest_of_a_block_is_cleared_in_a_launch_and_a_wait_for_its_event(
    gpu: FakeGpu, make: Callable[[], Any]
) -> None:
    with gpu:
        pool = make()
        assert write(pool, range(2)).done
        with gpu.counted() as counts:
            pool.clear(1, 5, 11)
        offer(gpu, pool)
    assert counts.operations() == {"zero_": 1}
    assert [why for why, _ in counts.syncs.elements()] == ["event.synchronize"]


def offered_when_its_scatter_is_queued(gpu: FakeGpu, pool: Any) -> None:
    write(pool, range(2))
    offer(gpu, pool)


@patch.object(Event, "synchronize", lambda _: None)
def offered_before_the_rest_is_clear(gpu: FakeGpu, pool: Any) -> None:
    pool.clear(1, 5, 11)
    offer(gpu, pool)


@patch.object(DeviceWrite, "done", True)
def cleared_before_its_scatter_has_ended(gpu: FakeGpu, pool: Any) -> None:
    assert write(pool, range(2)).done
    pool.clear(1, 5, 11)


@pytest.mark.parametrize(
    "mistake",
    [offered_when_its_scatter_is_queued, offered_before_the_rest_is_clear, cleared_before_its_scatter_has_ended],
)
def test_a_planted_mistake_is_found(
    guard: str, make: Callable[[], Any], mistake: Callable[[FakeGpu, Any], None]
) -> None:
    gpu = FakeGpu(guard)
    with gpu:
        mistake(gpu, make())
        assert gpu.races
