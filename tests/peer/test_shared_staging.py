"""The staging area that prefill stages write into: its layout, its file, and what it is where there is no /dev/shm."""

import errno
import mmap
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.types.kv.backends import SHM, PoolLayout
from headrace.core.types.kv.geometry import Geometry
from headrace.gateway.vllm_nixl.kv_pool import vllm_layout
from headrace.peer import shared_staging
from headrace.peer.shared_staging import SharedStaging
from headrace.peer.staging import Staging, StagingMemory
from headrace.transfer.backends.shm import ShmTransport
from headrace.transfer.backends.writer_locks import FOLDER, host_token
from headrace.transfer.protocol.layout import Box

needs_shm = pytest.mark.skipif(not host_token(), reason="no shared memory here")
GEOMETRY = Geometry("bfloat16", layers=3, kv_heads=2, head_dim=4, page_size=16)
PAGES = 5


@pytest.fixture(params=["shared", "no /dev/shm", "no room"])
def staging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedStaging]:
    if request.param == "shared":
        if not host_token():
            pytest.skip("no shared memory here")
    elif request.param == "no /dev/shm":
        monkeypatch.setattr(shared_staging, "host_token", lambda: "")
    else:
        monkeypatch.setattr(shared_staging, "SharedPool", no_room)
    with closing(SharedStaging(GEOMETRY, vllm_layout(GEOMETRY, PAGES))) as made:
        assert bool(made.memory) == bool(made.registered_pools) == (request.param == "shared")
        yield made


def no_room(layout: PoolLayout) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_pages_are_where_the_layout_has_them_and_in_every_mapping(staging: SharedStaging) -> None:
    """Against Staging, page by page and piece by piece, and against an array of the shape that vLLM has."""
    plain: StagingMemory = Staging(GEOMETRY, PAGES * 16, page_tokens=16)
    assert (plain.pages, plain.geometry) == (staging.pages, staging.geometry)
    random = np.random.default_rng(3)
    for page in random.permutation(PAGES):
        for box in (Box(slice(0, 2), slice(0, 2)), Box(slice(2, 3), slice(0, 1)), Box(slice(2, 3), slice(1, 2))):
            for slot, count in ((0, 5), (5, 11)):
                piece = random.integers(0, 255, plain.view(page, slot, count, box).shape, np.uint8)
                for store in (plain, staging):
                    store.write(page, slot, count, piece, box)
                    assert np.array_equal(store.read(page, slot, count, box), piece)
    with mmap.mmap(staging.file, 0) as again:
        assert bytes(again) == bytes(staging.buffer)
    blocks = np.frombuffer(bytes(staging.buffer), np.uint16).reshape(3, PAGES, 2, 16, 2, 4)  # L, page, H, slot, K|V, D
    expected = plain.read(0, 0, PAGES * 16).view(np.uint16)  # L, K|V, H, tokens, D
    assert np.array_equal(blocks.transpose(0, 4, 2, 1, 3, 5).reshape(expected.shape), expected)


def test_what_does_not_fit_into_its_memory_leaves_nothing_behind(staging: SharedStaging) -> None:
    before = sorted(FOLDER.iterdir())
    layout = vllm_layout(GEOMETRY, PAGES)
    with pytest.raises(ValueError, match="do not lie within"):
        SharedStaging(GEOMETRY, replace(layout, bytes=layout.bytes - 1))
    assert sorted(FOLDER.iterdir()) == before


@needs_shm
def test_a_prefill_stage_writes_what_frames_would_have_brought() -> None:
    with closing(SharedStaging(GEOMETRY, vllm_layout(GEOMETRY, PAGES))) as staging:
        assert staging.memory is not None
        pages = ShmTransport().open("s", 0, GEOMETRY, staging.memory)
        piece = np.random.default_rng(1).integers(0, 255, (3, 2, 2, 9, 8), np.uint8)
        pages.write(3, 7, 9, piece)
        assert np.array_equal(staging.read(3, 7, 9), piece)
        assert not staging.registered_pools[SHM].revoke("s", 0), "it may still write"
        pages.close()
        assert staging.registered_pools[SHM].revoke("s", 0)
