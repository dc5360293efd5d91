"""Pools in shared memory: what a stage maps, what it writes, and who may still write when."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.types.kv.backends import PoolMemory, SharedMemory
from headrace.core.types.kv.geometry import Component, Geometry
from headrace.transfer.backends.shm import SharedPool, ShmPages, ShmTransport
from headrace.transfer.backends.strided_pool import ArrayPageStore, StridedPool, c_order
from headrace.transfer.backends.writer_locks import FOLDER, OWNER_BYTE, host_token, sweep, writer_byte
from headrace.transfer.protocol.layout import Box
from tests.transfer.children import child, line_of
from tests.transfer.harness import random_store
from tests.transfer.layouts import random_layout

pytestmark = pytest.mark.skipif(not host_token(), reason="no shared memory here")

GEOMETRY = Geometry("float16", layers=3, kv_heads=2, head_dim=4, page_size=8)
SESSION = "s" * 32
PAGES = 6
LAYOUT = c_order(GEOMETRY, PAGES)


@pytest.fixture
def pool() -> Iterator[SharedPool]:
    made = SharedPool(LAYOUT)
    yield made
    made.close()


def opened(pool: SharedPool, session: str = SESSION, stage: int = 0) -> ShmPages:
    return ShmTransport().open(session, stage, GEOMETRY, PoolMemory(shm=pool.memory))


def path_of(memory: SharedMemory) -> Path:
    return FOLDER / memory.name


def test_the_file_is_for_its_user_alone_all_there_and_gone_when_its_owner_ends() -> None:
    pool = SharedPool(LAYOUT)
    found = path_of(pool.memory).stat()
    assert (found.st_mode & 0o777, found.st_size) == (0o600, PAGES * GEOMETRY.page_bytes)
    assert found.st_blocks * 512 >= found.st_size
    pages = opened(pool)
    pool.close()
    assert not path_of(pool.memory).exists()
    pages.write(0, 0, 1, np.full((3, 2, 2, 1, 8), 7, np.uint8))  # memory that is mapped stays
    assert bytes(pool.buffer).count(7) == 3 * 2 * 2 * 8
    pages.close()


@settings(deadline=None, max_examples=50)
@given(st.data(), st.randoms(use_true_random=False))
def test_writes_land_where_the_pool_has_its_slots(data: st.DataObject, random: Random) -> None:
    """In C order, or with K and V, heads, slots, layers, pages and components in any order, with gaps."""
    dtype, *sizes = (data.draw(st.sampled_from(["float16", "float32"])), *(data.draw(st.integers(1, 4)) for _ in "lhd"))
    components = data.draw(st.sampled_from([(), (Component("latent", "float32", 2, 1, 3, planes=1),)]))
    geometry = Geometry(dtype, *sizes, page_size=data.draw(st.integers(1, 9)), components=components)
    layout = data.draw(st.sampled_from([c_order(geometry, PAGES), random_layout(geometry, PAGES, random)]))
    pool = SharedPool(layout)
    try:
        shared, twin = StridedPool(geometry, layout, pool.buffer), ArrayPageStore(geometry, PAGES)
        pages = ShmTransport().open(SESSION, 0, geometry, PoolMemory(shm=pool.memory))
        source = random_store(geometry, PAGES)
        for tensor in geometry.tensors * 3:
            page, slot = data.draw(st.integers(0, PAGES - 1)), data.draw(st.integers(0, geometry.page_size - 1))
            count = data.draw(st.integers(1, geometry.page_size - slot))
            box = Box(_range(data, tensor.layers), _range(data, tensor.kv_heads), tensor.name)
            piece = source.view(page, slot, count, box)
            twin.write(page, slot, count, piece, box)
            pages.write(page, slot, count, piece, box)
        assert pages.flush().done
        for name, expected in twin.tensors.items():
            assert np.array_equal(shared.tensors[name], expected)
        pages.close()
    finally:
        pool.close()


def _range(data: st.DataObject, length: int) -> slice:
    start = data.draw(st.integers(0, length - 1))
    return slice(start, data.draw(st.integers(start + 1, length)))


@pytest.mark.parametrize(("page", "slot", "count"), [(-1, 0, 1), (PAGES, 0, 1), (0, -1, 1), (0, 8, 1), (0, 7, 2)])
def test_a_write_beside_the_pool_is_refused(pool: SharedPool, page: int, slot: int, count: int) -> None:
    pages = opened(pool)
    with pytest.raises(IndexError):
        pages.write(page, slot, count, np.ones((3, 2, 2, count, 8), np.uint8))
    assert not any(pool.buffer)
    pages.close()


def _symlink(path: Path) -> None:
    path.rename(path.with_name("headrace-test-target"))
    path.symlink_to("headrace-test-target")


def _holes(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(0o700)


SPOILED: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda path: path.unlink(), "No such file"),
    ("a link", _symlink, "symbolic links"),
    ("a folder", _folder, "directory"),
    ("too small", lambda path: os.truncate(path, path.stat().st_size - 1), "bytes and not"),
    ("open to all", lambda path: path.chmod(0o666), "open to other users"),
    ("not in memory", _holes, "holes"),
]
if os.geteuid() == 0:
    SPOILED.append(("another user's", lambda path: os.chown(path, 12345, -1), "another user"))


@pytest.mark.parametrize(("spoil", "says"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED])
def test_only_a_whole_file_of_ones_own_is_mapped(pool: SharedPool, spoil: Callable[[Path], object], says: str) -> None:
    path = path_of(pool.memory)
    try:
        spoil(path)
        with pytest.raises((OSError, ValueError), match=says):
            opened(pool)
        assert pool.revoke(SESSION, 0), "a process that could not map it has no right to write"
    finally:
        path.with_name("headrace-test-target").unlink(missing_ok=True)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()


def test_a_file_that_no_owner_has_locked_is_not_written_into(pool: SharedPool) -> None:
    """Another program's: any peer of the control endpoint could name it."""
    other = FOLDER / "headrace-test-target"
    try:
        other.write_bytes(bytes(pool.memory.bytes))
        other.chmod(0o600)
        with pytest.raises(ValueError, match="has no owner"):
            ShmPages(SESSION, 0, GEOMETRY, replace(pool.memory, name=other.name))
    finally:
        other.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "changes",
    [{"pages": PAGES + 1}, {"offset": 1}, {"strides": (1 << 40, 1, 1, 1, 1)}, {"strides": (768, 256, 128, 72, 8)}],
)
def test_pages_that_leave_the_file_are_not_mapped(pool: SharedPool, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="do not lie within"):
        ShmPages(SESSION, 0, GEOMETRY, replace(pool.memory, **changes))
    assert pool.revoke(SESSION, 0)


def test_a_right_is_taken_back_only_when_the_writer_has_let_go_and_then_for_good(pool: SharedPool) -> None:
    pages = opened(pool)
    assert not pool.revoke(SESSION, 0)
    assert pool.revoke(SESSION, 1), "every stage has a right of its own"
    assert pool.revoke("t" * 32, 0), "and every session"
    pages.close()
    assert pool.revoke(SESSION, 0)
    assert pool.revoke(SESSION, 0)
    with pytest.raises(ValueError, match="ended the session"):
        opened(pool)
    again = opened(pool, session="u" * 32)
    again.close()


@given(st.text(max_size=40), st.integers(0, 1 << 20))
def test_a_right_is_never_the_owners_lock_and_fits_into_a_file_offset(session: str, stage: int) -> None:
    assert OWNER_BYTE < writer_byte(session, stage) < (1 << 63) - 1


WRITER = """
import sys, msgspec, numpy as np
from headrace.core.types.kv.backends import SharedMemory
from tests.transfer.backends.test_shm import GEOMETRY, SESSION
from headrace.transfer.backends.shm import ShmPages
pages = ShmPages(SESSION, 0, GEOMETRY, msgspec.json.decode(sys.argv[1], type=SharedMemory))
print("mapped", flush=True)
number = 0
while True:
    number = number % 250 + 1
    for page in range(6):
        pages.write(page, 0, 8, np.full((3, 2, 2, 8, 8), number, np.uint8))
"""

OWNER = """
import sys, time, msgspec
from tests.transfer.backends.test_shm import LAYOUT
from headrace.transfer.backends.shm import SharedPool
pool = SharedPool(LAYOUT)
print(msgspec.json.encode(pool.memory).decode(), flush=True)
time.sleep(60)
"""


def changes(pool: SharedPool) -> bool:
    """Whether any process writes into the pool within a tenth of a second."""
    before = bytes(pool.buffer)
    signal.sigtimedwait([], 0.1)
    return bytes(pool.buffer) != before


def test_a_stopped_writer_keeps_its_right_and_a_killed_one_loses_it(pool: SharedPool) -> None:
    """The pages of a silent process stay where they are: it does go on. Those of a dead one are free at once."""
    writer = child(WRITER, msgspec.json.encode(pool.memory).decode())
    try:
        assert line_of(writer) == "mapped"
        assert changes(pool)
        writer.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
        assert not changes(pool)
        assert not pool.revoke(SESSION, 0), "it is silent, not dead"
        writer.send_signal(signal.SIGCONT)
        assert changes(pool), "and it does write again"
        assert not pool.revoke(SESSION, 0)
    finally:
        writer.kill()
        writer.communicate()
    assert pool.revoke(SESSION, 0)
    poison = np.frombuffer(pool.buffer, np.uint8)
    poison[:] = 0xEE
    assert not changes(pool)
    assert (poison == 0xEE).all()


def test_the_pool_of_a_killed_owner_is_removed_when_its_writer_closes_it() -> None:
    owner = child(OWNER)
    try:
        memory = msgspec.json.decode(line_of(owner), type=SharedMemory)
        pages = ShmPages(SESSION, 0, GEOMETRY, memory)
        sweep()
        assert path_of(memory).exists(), "its owner lives"
    finally:
        owner.kill()
        owner.communicate()
    pages.write(0, 0, 8, np.ones((3, 2, 2, 8, 8), np.uint8))  # into memory that is not read: no harm, no signal
    assert path_of(memory).exists()
    pages.close()
    assert not path_of(memory).exists()


def test_a_pool_that_does_not_fit_leaves_nothing_behind() -> None:
    before = sorted(FOLDER.iterdir())
    status = os.statvfs(FOLDER)
    pages = 2 * status.f_blocks * status.f_frsize // GEOMETRY.page_bytes
    with pytest.raises(OSError, match=r"No space|Cannot allocate"):
        SharedPool(c_order(GEOMETRY, pages))
    assert sorted(FOLDER.iterdir()) == before
