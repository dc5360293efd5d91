"""Makes the exchange of a rank, in the way that its stage shares experts."""

from headrace.engine.collectives.base import Collectives
from headrace.engine.layers.exchange.all_gather import AllGather
from headrace.engine.layers.exchange.all_to_all import AllToAll
from headrace.engine.layers.exchange.base import Exchange
from headrace.engine.layers.exchange.replicated import Replicated
from headrace.engine.layers.exchange.ways import Way
from headrace.engine.model.moe_spec import MoeSpec


def make_exchange(way: Way, moe: MoeSpec, tp: Collectives, dp: Collectives, ep: Collectives) -> Exchange:
    """The exchange of one rank. tp: shards of its replica. dp: ranks of the same shard of all replicas. ep: all ranks
    of its stage, by replica and shard."""
    match way:
        case "replicated":
            return Replicated(moe.experts, tp)
        case "allgather":
            return AllGather(moe.experts, tp, dp)
        case "alltoall":
            return AllToAll(moe.experts, tp, ep)
