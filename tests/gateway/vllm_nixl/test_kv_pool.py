"""The gateway's pool: vLLM's memory layout, and mappings of it that can be taken away from readers."""

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.vllm_nixl.kv_pool import HostStaging, PoolMapping, VllmPool, vllm_layout

GEOMETRY = Geometry("bfloat16", 3, 2, 8, 16)
PAGES = 5


@pytest.fixture
def pool() -> Iterator[VllmPool]:
    made = VllmPool(GEOMETRY, PAGES)
    yield made
    made.close()


@pytest.fixture
def staging() -> Iterator[HostStaging]:
    made = HostStaging(GEOMETRY, vllm_layout(GEOMETRY, PAGES))
    yield made
    made.close()


def test_tokens_lie_as_vllm_reads_them(pool: VllmPool) -> None:
    """[layer][block][head][token][keys, values], one region for each layer."""
    rng = np.random.default_rng(1)
    kv = rng.integers(0, 255, (PAGES, 3, 2, 2, 16, 16), np.uint8)  # [page, layer, K/V, head, token, bytes]
    for page in range(PAGES):
        pool.staging.write(page, 0, 16, kv[page])
    memory = np.frombuffer(pool.staging.region().memory, np.uint8)
    assert pool.block_bytes == 2 * 16 * 2 * 16
    assert pool.region_offsets == tuple(layer * PAGES * pool.block_bytes for layer in range(3))
    for layer, offset in enumerate(pool.region_offsets):
        region = memory[offset : offset + PAGES * pool.block_bytes].reshape(PAGES, 2, 16, 2, 16)
        assert np.array_equal(region, kv[:, layer].transpose(0, 2, 3, 1, 4))


@pytest.mark.parametrize(("tokens", "kept"), [(1, 1), (15, 15), (16, 16), (17, 1)])
def test_what_follows_a_prompt_in_its_last_page_is_cleared(pool: VllmPool, tokens: int, kept: int) -> None:
    for page in range(PAGES):
        pool.staging.view(page, 0, 16)[...] = 7
    pool.zero_tail(1, tokens)
    last = pool.staging.read(1 + (tokens - 1) // 16, 0, 16)
    assert (last[..., :kept, :] == 7).all()
    assert not last[..., kept:, :].any()
    assert (pool.staging.read(0, 0, 16) == 7).all()
    assert (pool.staging.read(4, 0, 16) == 7).all()


def peek(address: int, size: int) -> bytes:
    """Memory of this process, copied as another process of its user could do it. Raises OSError."""

    class Range(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    buffer = ctypes.create_string_buffer(size)
    here, there = Range(ctypes.addressof(buffer), size), Range(address, size)
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    if read(os.getpid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) != size:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw


def test_a_retired_mapping_can_be_read_by_nobody(staging: HostStaging) -> None:
    staging.view(0, 0, 16)[...] = 9
    mapping, other = staging.region(), staging.region()
    assert peek(mapping.address, 64) == bytes([9]) * 64 == bytes(other.memory[:64])
    mapping.retire()
    with pytest.raises(OSError, match="Bad address"):
        peek(mapping.address, 64)
    assert peek(other.address, 64) == bytes([9]) * 64
    later = [mmap.mmap(-1, mapping.size) for _ in range(20)]  # none of them takes its place
    with pytest.raises(OSError, match="Bad address"):
        peek(mapping.address, 64)
    for one in later:
        one.close()
    other.retire()


def test_a_mapping_of_no_file() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        PoolMapping(-1, 4096)
