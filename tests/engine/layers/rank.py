"""A rank of a stage of processes that exchange rows of experts over Gloo: `python -m … PORT DP TP RANK`."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.core.types.ranks.layout import Layout
from headrace.engine.collectives.torch_collectives import TorchCollectives, make_group
from headrace.engine.layers.exchange import make_exchange
from headrace.engine.model.expert_plan import Way
from tests.engine.layers.mixtures import SPECS, make_mixture, random_rows

TIMEOUT_S = 30.0
COUNTS = (5, 0, 17)  # tokens of each replica
WAYS: tuple[Way, ...] = ("allgather", "alltoall")


def main() -> None:
    port, dp, tp, rank = map(int, sys.argv[1:])
    layout = Layout(dp=dp, tp=tp)
    size = len(layout.ranks)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    shards = [make_group(layout.shards(layout.rank(0, replica)), TIMEOUT_S) for replica in range(dp)]
    across = [make_group(layout.across_replicas(shard), TIMEOUT_S) for shard in range(tp)]
    stage = make_group(layout.ranks, TIMEOUT_S)
    _, replica, shard = layout.place(rank)
    groups = [TorchCollectives(group) for group in (shards[replica], across[shard], stage)]
    for turn, counts in enumerate((COUNTS[:dp], COUNTS[:dp][::-1])):
        for moe in SPECS.values():
            for dtype in (torch.float32, torch.bfloat16):
                x = random_rows(counts[replica], 10 * turn + replica, dtype=dtype)
                expected = make_mixture(moe, dtype=dtype).forward(x)
                for way in WAYS:
                    exchange = make_exchange(way, moe, *groups)
                    exchange.begin(counts, max(counts))
                    found = make_mixture(moe, exchange, dtype=dtype).forward(x)
                    tolerance = 2e-5 if dtype == torch.float32 else 0.02
                    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
