"""A rank of a group of processes, which checks the collective operations, over Gloo and through shared memory:
`python -m … PORT SIZE RANK`."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.core.types.ranks.coordinate import coordinate
from headrace.engine.agreement import agree
from headrace.engine.collectives.host_staged import HostStaged
from headrace.engine.collectives.operations import Collectives, LinkBroken, breakable
from headrace.engine.collectives.shared_memory import SharedMemoryCollectives, on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.collectives.watch import abort_groups
from tests.engine.collectives.test_collectives import check, operations
from tests.engine.votes import rounds

TIMEOUT_S = 30.0


def every(group: Collectives, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Results of operations on numbers whose sums are rounded."""
    mine = torch.randn(group.size * 50, 7, generator=torch.Generator().manual_seed(rank)).to(dtype)
    equal = [50] * group.size
    pending = (
        group.all_reduce(mine.clone()), group.all_gather(mine), group.reduce_scatter(mine),
        group.all_to_all(mine, equal, equal), group.broadcast(mine.clone(), 0), group.gather(mine, 0),
    )  # fmt: skip
    return [each.wait() for each in pending]


def main() -> None:
    port, size, rank = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    made = make_group(range(size), TIMEOUT_S, name="tp")
    assert made.group_desc == "tp"
    group = TorchCollectives(made)
    staged = HostStaged(group)
    shared = on_one_machine(group, TIMEOUT_S)
    assert isinstance(shared, SharedMemoryCollectives)
    for each in (group, shared, staged, HostStaged(shared)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            check(size, rank, operations(each, dtype), dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        direct, through = (every(each, rank, dtype) for each in (group, staged))
        assert all(map(torch.equal, direct, through)), f"{dtype}: other bits through host memory"
    for votes, rules in rounds(size, 30):
        assert agree(votes[rank], group, rules) == coordinate(votes, rules)
    dist.barrier()
    abort_groups()
    assert not dist.is_initialized()
    try:
        with breakable():  # as sampled tokens are
            dist.broadcast(torch.zeros(1), src=0, group=made)
    except LinkBroken:
        return
    raise AssertionError("an operation of a group that was aborted")


if __name__ == "__main__":
    main()
