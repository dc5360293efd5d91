"""Collectives through shared memory: sums to the bit, ranks that end, stop or differ, and who uses it at all."""

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.engine.collectives import segment
from headrace.engine.collectives.operations import Collectives, LinkBroken
from headrace.engine.collectives.segment import Segment, SegmentPart, form_segment, make_parts
from headrace.engine.collectives.shared_memory import SharedMemoryCollectives, on_one_machine, shared_sums
from tests.engine.collectives.test_collectives import check, operations
from tests.engine.collectives.threads import ThreadCollectives, run_ranks

T = TypeVar("T")
LIBRARY = shared_sums()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native code was not compiled")
TILE = 1 << 18  # bytes, as in shared_sums.c
TIMEOUT_S = 30.0
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MEMORY_BYTES = 1 << 16


def parts_of(size: int) -> list[SegmentPart]:
    assert LIBRARY is not None
    return make_parts(size, LIBRARY.headrace_shared_bytes(size))


def member(part: SegmentPart, rank: int, timeout_s: float = TIMEOUT_S) -> SharedMemoryCollectives:
    """Without a group for the rest: nothing here may go over it."""
    assert LIBRARY is not None
    return SharedMemoryCollectives(LIBRARY, Segment(part, rank), None, timeout_s)  # type: ignore[arg-type]


def run(size: int, work: Callable[[SharedMemoryCollectives], T], timeout_s: float = TIMEOUT_S) -> list[T]:
    """The results of work() at ranks that are threads, each with a mapping of its own. One that is done leaves."""

    def one(part: SegmentPart, rank: int) -> T:
        group = member(part, rank, timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, part, rank) for rank, part in enumerate(parts_of(size))]
    return [future.result() for future in futures]


def numbers(seed: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Of magnitudes so different that every order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-6, 6, (count,), generator=generator)
    return (values * 1e3).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    """In order of rank, in float32 for bfloat16, rounded once."""
    wide = torch.float32 if parts[0].dtype == torch.bfloat16 else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


Step = tuple[str, int, torch.dtype]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "all_reduce", "all_gather", "broadcast", "gather"]),
        st.one_of(st.integers(0, 40), st.integers(0, 3 * TILE // 4)),  # up to three tiles of float32
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), STEPS)
def test_any_operations_of_any_sizes(size: int, steps: list[Step]) -> None:
    """One after the other, so that ranks are in different ones at times; to the bit, on all ranks."""

    def work(group: SharedMemoryCollectives) -> list[Tensor]:
        results = []
        for seed, (name, count, dtype) in enumerate(steps):
            mine, other = numbers(seed, group.rank, count, dtype), seed % group.size
            match name:
                case "all_reduce":
                    pending = group.all_reduce(mine)
                case "all_gather":
                    pending = group.all_gather(mine)
                case "broadcast":
                    pending = group.broadcast(mine, other)
                case _:
                    pending = group.gather(mine, other)
            results.append(pending.wait())
        return results

    found = run(size, work)
    for seed, (name, count, dtype) in enumerate(steps):
        parts, other = [numbers(seed, rank, count, dtype) for rank in range(size)], seed % size
        results = {"all_reduce": summed(parts), "broadcast": parts[other]}
        for rank in range(size):
            expected = results.get(name, torch.cat(parts) if name == "all_gather" or rank == other else parts[0][:0])
            assert torch.equal(found[rank][seed], expected), f"step {seed}, {name}, at rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_infinities_and_nan(size: int, dtype: torch.dtype) -> None:
    """As of torch; an overflow of bfloat16 is rounded to infinity."""
    most = float(torch.finfo(dtype).max)
    rows = [[torch.inf, -torch.inf, torch.nan, most, most, -0.0], [1.0, torch.inf, 1.0, most, -most, -0.0]]
    parts = [torch.tensor(row, dtype=dtype) for row in (*rows, [0.0] * 6)[:size]]
    expected = summed(parts)
    for found in run(size, lambda group: group.all_reduce(parts[group.rank].clone()).wait()):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_rank_that_leaves_ends_the_operation_of_the_others() -> None:
    """At once; also where they wait for another rank, which waits for it."""

    def work(group: SharedMemoryCollectives) -> str:
        group.all_reduce(torch.zeros(3))
        if group.rank == 2:
            return ""
        with pytest.raises(LinkBroken) as broken:
            group.all_reduce(torch.zeros(3))
        return str(broken.value)

    first, second, _ = run(3, work)
    assert {first, second} <= {f"shard {rank} has ended" for rank in range(3)}
    assert "shard 2 has ended" in (first, second)


def test_what_a_rank_has_given_counts_after_its_end() -> None:
    def work(group: SharedMemoryCollectives) -> Tensor:
        if group.rank == 0:
            assert gone.wait(TIMEOUT_S)
        found = group.gather(torch.ones(3) * group.rank, 0).wait()
        if group.rank:
            group.close()
            gone.set()
        return found

    gone = threading.Event()
    parts = parts_of(2)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, [member(part, rank) for rank, part in enumerate(parts)]))
    assert found[0].tolist() == [0.0] * 3 + [1.0] * 3


def test_different_operations_are_found() -> None:
    def work(group: SharedMemoryCollectives) -> None:
        group.all_reduce(torch.zeros(1 + group.rank))

    with pytest.raises(LinkBroken, match="is in another operation"):
        run(2, work)


@contextmanager
def other_process(timeout_s: float) -> Iterator[tuple[SharedMemoryCollectives, subprocess.Popen[bytes]]]:
    """Rank 0, and the process of rank 1, which has taken part in an operation."""
    mine, others = parts_of(2)
    command = [sys.executable, "-m", "tests.engine.collectives.shared_rank", str(others.memory), str(*others.sockets)]
    process = subprocess.Popen(command, pass_fds=(others.memory, *others.sockets))
    others.close()
    group = member(mine, 0)
    try:
        group.all_reduce(torch.zeros(100_000))
        group.timeout_s = timeout_s
        yield group, process
    finally:
        process.kill()
        process.wait()
        group.close()


def add_up(group: Collectives) -> None:
    """Until it fails."""
    while True:
        group.all_reduce(torch.zeros(100_000))


def test_a_killed_process_ends_the_operation() -> None:
    with other_process(TIMEOUT_S) as (group, process):
        process.kill()  # in an operation: it waits for this rank
        with pytest.raises(LinkBroken, match="shard 1 has ended"):
            add_up(group)


def test_a_stopped_process_ends_the_operation_in_time() -> None:
    with other_process(timeout_s=0.2) as (group, process):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with pytest.raises(LinkBroken, match=r"shard 1 did not come in 0\.2 s"):
            add_up(group)


@contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


def formed(group: Collectives, sizes: dict[int, int]) -> bool:
    found = form_segment(group, sizes.get(group.rank, MEMORY_BYTES))
    if found is not None:
        found.close()
    return found is not None


def test_ranks_find_each_other() -> None:
    """And what shared memory does not do goes over the group that they know each other by."""

    def work(group: Collectives) -> dict[str, Tensor]:
        assert isinstance(group, ThreadCollectives)
        shared = on_one_machine(group, TIMEOUT_S)
        assert isinstance(shared, SharedMemoryCollectives)
        before = len(group.operations)
        results = operations(shared)
        assert [each.split()[0] for each in group.operations[before:]] == ["reduce_scatter", "counts", "all_to_all"]
        shared.close()
        return results

    with no_descriptors_left():
        for rank, results in enumerate(run_ranks(3, work)):
            check(3, rank, results)


@pytest.mark.parametrize("unable", [0, 2])
def test_all_or_none_use_it(unable: int) -> None:
    with no_descriptors_left():
        assert run_ranks(3, partial(formed, sizes={unable: 0})) == [False] * 3


def test_not_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_host", lambda: secrets.token_bytes(32))
    with no_descriptors_left():
        assert run_ranks(2, partial(formed, sizes={})) == [False] * 2


def test_a_rank_that_cannot_map_it_has_all_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unlucky(Segment):
        def __init__(self, part: SegmentPart, rank: int) -> None:
            if rank == 1:
                raise OSError("no address space")
            super().__init__(part, rank)

    monkeypatch.setattr(segment, "Segment", Unlucky)
    with no_descriptors_left():
        assert run_ranks(3, partial(formed, sizes={})) == [False] * 3


def test_nothing_of_it_has_a_name_or_a_reader() -> None:
    """The memory has no file, is the user's only, and keeps its size."""
    before = set(Path("/dev/shm").iterdir())
    [part, other] = parts_of(2)
    try:
        assert os.fstat(part.memory).st_mode & 0o777 == 0o600
        assert os.fstat(part.memory).st_nlink == 0
        assert set(Path("/dev/shm").iterdir()) <= before
        with pytest.raises(PermissionError):
            os.ftruncate(part.memory, 0)
    finally:
        part.close()
        other.close()
