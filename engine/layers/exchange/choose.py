"""Chooses how the ranks of a stage exchange tokens of experts, and how much memory that takes at most."""

from typing import Literal

from headrace.core.types.errors import ConfigError
from headrace.engine.collectives.base import Collectives
from headrace.engine.layers.exchange import all_gather, all_to_all
from headrace.engine.layers.exchange.all_gather import AllGather
from headrace.engine.layers.exchange.all_to_all import AllToAll
from headrace.engine.layers.exchange.base import Exchange
from headrace.engine.layers.exchange.parcels import parcel_bytes
from headrace.engine.layers.exchange.replicated import Replicated
from headrace.engine.layers.experts import TILE_ROWS
from headrace.engine.model.moe_spec import MoeSpec

Way = Literal["replicated", "allgather", "alltoall"]
SUM_BYTES = 4  # of an element of the sums, which are in float32


def choose_way(wanted: Literal["auto", "allgather", "alltoall"], moe: MoeSpec, *, dp: int, tp: int, device: str) -> Way:
    """How experts that are divided among all ranks of a stage are reached.

    auto: by replication within one replica; by all-gather on GPUs, and where there are no more ranks than experts of a
    token, so that most tokens have to go to most ranks anyway; else by all-to-all. Raises ConfigError for more ranks
    than experts.
    """
    ranks = dp * tp
    if ranks > moe.experts:
        raise ConfigError(
            f"{moe.experts} experts cannot be divided among {ranks} ranks; write --expert-parallel with {moe.experts} "
            "ranks or less in a stage (--dp times --tp)"
        )
    if wanted != "auto":
        return wanted
    if dp == 1:
        return "replicated"
    return "allgather" if ranks <= moe.top_k or device != "cpu" else "alltoall"


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


def exchange_bytes(way: Way, moe: MoeSpec, hidden: int, item_bytes: int, tokens: int, *, dp: int, tp: int) -> int:
    """Bytes that a rank's experts and their exchange need besides weights, however tokens are routed.

    hidden: hidden size. item_bytes: of an element of the hidden states. tokens: of the longest pass of a replica.
    """
    parcel, row_sum = parcel_bytes(hidden, moe.top_k, item_bytes), hidden * SUM_BYTES
    # A tile of one expert's rows: hidden states, gate and up, their product, result, and result in float32.
    tile = TILE_ROWS * (item_bytes * (2 * hidden + 3 * moe.intermediate_size) + row_sum)
    sums = tokens * row_sum
    match way:
        case "replicated":
            return tile + sums
        case "allgather":
            rows = min(tokens, all_gather.TILE_TOKENS)
            return tile + sums + rows * (1 + dp) * (parcel + row_sum)
        case "alltoall":
            own = -(-tokens // tp)
            rows = min(own, all_to_all.TILE_TOKENS)
            copies = rows * min(moe.top_k, dp * tp)  # of tokens sent, and of results that come back
            received = rows * dp * tp  # every rank sends every token to this one
            whole = own * row_sum + (2 * sums if tp > 1 else 0)
            return tile + whole + copies * (hidden * item_bytes + parcel + row_sum) + received * (parcel + row_sum)
