"""Ways in which the ranks of a stage share experts, which experts each holds, and the memory that it takes. Pure
arithmetic."""

from typing import Literal

from headrace.core.types.errors import ConfigError
from headrace.engine.model.moe_spec import MoeSpec

Way = Literal["replicated", "allgather", "alltoall"]
TILE_ROWS = 512  # rows of one expert that are computed together: scratch is bounded however tokens are routed
TILE_TOKENS = 1024  # of each rank, that are exchanged at once: bounds the rows that a rank receives
SUM_BYTES = 4  # of an element of the sums, which are in float32
WORD = 4  # bytes of an int32, in which parcels are exchanged


def own_experts(experts: int, ranks: int, rank: int) -> range:
    """The experts of a rank, of so many in a layer: consecutive ones, equally many but for one."""
    return range(rank * experts // ranks, (rank + 1) * experts // ranks)


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


def parcel_bytes(hidden: int, k: int, item_bytes: int) -> int:
    """Bytes of one parcel. hidden: hidden size. k: experts per token."""
    return hidden * item_bytes + 2 * WORD * k


def exchange_bytes(
    way: Way, moe: MoeSpec, hidden: int, item_bytes: int, tokens: int, *, dp: int, tp: int, halved: bool = False
) -> int:
    """Bytes that a rank's experts and their exchange need besides weights, however tokens are routed.

    hidden: hidden size. item_bytes: of an element of the hidden states. tokens: of the longest pass of a replica.
    halved: passes may be cut in halves, each of which then exchanges a tile.
    """
    parcel, row_sum = parcel_bytes(hidden, moe.top_k, item_bytes), hidden * SUM_BYTES
    # A tile of one expert's rows: hidden states, gate and up, their product, result, and result in float32.
    tile = TILE_ROWS * (item_bytes * (2 * hidden + 3 * moe.intermediate_size) + row_sum)
    sums = tokens * row_sum
    match way:
        case "replicated":
            return tile + sums
        case "allgather":
            rows = _exchanged(tokens, halved)
            return tile + sums + rows * (1 + dp) * (parcel + row_sum)
        case "alltoall":
            own = -(-tokens // tp)
            rows = _exchanged(own, halved)
            copies = rows * min(moe.top_k, dp * tp)  # of tokens sent, and of results that come back
            received = rows * dp * tp  # every rank sends every token to this one
            whole = own * row_sum + (2 * sums if tp > 1 else 0)
            return tile + whole + copies * (hidden * item_bytes + parcel + row_sum) + received * (parcel + row_sum)


def _exchanged(tokens: int, halved: bool) -> int:
    """Rows of a rank that are exchanged at once, of so many tokens. Halves may be rounded up."""
    return min(tokens + 2, 2 * TILE_TOKENS) if halved else min(tokens, TILE_TOKENS)
