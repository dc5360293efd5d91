"""Every implementation of Collectives gives the same results: threads, processes over Gloo and through shared memory,
and one rank alone."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace.engine.collectives.operations import Alone, Collectives, LinkBroken
from tests.engine.collectives.threads import run_ranks

TIMEOUT_S = 60


def operations(group: Collectives, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The results of every operation on tensors that depend on the rank."""
    size, rank = group.size, group.rank
    rows = torch.arange(size * 6).view(size * 2, 3)
    mine = (rows * (rank + 1)).to(dtype)
    counts = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    sent, received = counts[rank], [counts[source][rank] for source in range(size)]
    outgoing = torch.tensor([[rank, target] for target in range(size) for _ in range(sent[target])], dtype=dtype)
    return {
        "all_reduce": group.all_reduce(mine.clone()).wait(),
        "all_gather": group.all_gather(mine[:2]).wait(),
        "reduce_scatter": group.reduce_scatter(mine).wait(),
        "all_to_all": group.all_to_all(outgoing.view(-1, 2), sent, received).wait(),
        "broadcast": group.broadcast(mine.clone(), size - 1).wait(),
        "gather": group.gather(mine[:2], 0).wait(),
    }


def expected(size: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same, computed from their definitions."""
    rows = torch.arange(size * 6).view(size * 2, 3).to(dtype)
    every = [rows * (each + 1) for each in range(size)]
    summed = torch.stack(every).sum(0)
    arrived = [[source, rank] for source in range(size) for _ in range((source + rank) % 3)]
    firsts = torch.cat([each[:2] for each in every])
    return {
        "all_reduce": summed,
        "all_gather": firsts,
        "reduce_scatter": summed.chunk(size)[rank],
        "all_to_all": torch.tensor(arrived, dtype=dtype).view(-1, 2),
        "broadcast": every[-1],
        "gather": firsts if rank == 0 else firsts[:0],
    }


def check(size: int, rank: int, results: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    for name, tensor in expected(size, rank, dtype).items():
        assert torch.equal(results[name], tensor), f"{name} at rank {rank} of {size}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_threads(size: int) -> None:
    for rank, results in enumerate(run_ranks(size, operations)):
        check(size, rank, results)


def test_alone() -> None:
    check(1, 0, operations(Alone()))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes(size: int, tmp_path: Path) -> None:
    """Gloo and shared memory do all of them, in float32 and bfloat16, unequal and empty splits included."""
    store = socket.create_server(("127.0.0.1", 0))
    port = store.getsockname()[1]
    store.close()
    command = [sys.executable, "-m", "tests.engine.collectives.rank", str(port), str(size)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(size)]
    for process in ranks:
        _, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors


def _fails(rank: int) -> Callable[[Collectives], None]:
    def work(group: Collectives) -> None:
        group.all_reduce(torch.zeros(1)).wait()
        if group.rank == rank:
            raise ValueError("out of luck")
        group.all_reduce(torch.zeros(1)).wait()

    return work


def test_failed_rank_breaks_the_group() -> None:
    with pytest.raises(ValueError, match="out of luck"):
        run_ranks(3, _fails(1))


def test_missing_rank_is_named() -> None:
    def work(group: Collectives) -> None:
        if group.rank != 2:
            group.all_reduce(torch.zeros(1)).wait()

    with pytest.raises(LinkBroken, match=r"ranks \[2\] did not come to operation 0, all_reduce"):
        run_ranks(3, work, deadline_s=0.2)


def test_different_operations_are_found() -> None:
    def work(group: Collectives) -> None:
        rows = torch.zeros(1 + group.rank)
        group.all_reduce(rows).wait()

    with pytest.raises(LinkBroken, match="differs"):
        run_ranks(2, work)
