"""A rank of a group of processes, which checks the collective operations, over Gloo and through shared memory:
`python -m … PORT SIZE RANK`."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.core.types.ranks.coordinate import coordinate
from headrace.engine.agreement import agree
from headrace.engine.collectives.shared_memory import SharedMemoryCollectives, on_one_machine
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from tests.engine.collectives.test_collectives import check, operations
from tests.engine.votes import rounds

TIMEOUT_S = 30.0


def main() -> None:
    port, size, rank = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = TorchCollectives(make_group(range(size), TIMEOUT_S))
    shared = on_one_machine(group, TIMEOUT_S)
    assert isinstance(shared, SharedMemoryCollectives)
    for each in (group, shared):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            check(size, rank, operations(each, dtype), dtype)
    for votes, rules in rounds(size, 30):
        assert agree(votes[rank], group, rules) == coordinate(votes, rules)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
