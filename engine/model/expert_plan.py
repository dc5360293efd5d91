"""Division of experts: which ones each rank of a stage holds, in which way the ranks exchange tokens for them, and the
memory that it takes. Pure arithmetic.
"""

from typing import Literal, NamedTuple

from headrace.core.config import EngineConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ITEM_BYTES
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.types.ranks.layout import Layout, Place
from headrace.engine.device import Computation
from headrace.engine.model.config import ModelSpec
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
    # Rows of the shared experts' results, as they arrive from the shards and in their order.
    shared = 2 * tokens * hidden * item_bytes if moe.shared_size and tp > 1 else 0
    match way:
        case "replicated":
            return tile + sums + shared
        case "allgather":
            rows = _exchanged(tokens, halved)
            return tile + sums + shared + rows * (1 + dp) * (parcel + row_sum)
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


class ExpertPlan(NamedTuple):
    """Division of the routed experts of every layer among ranks."""

    moe: MoeSpec
    way: Way
    """How tokens reach the experts of other ranks."""
    dp: int
    """Replicas that divide the experts; 1 where each has all of them."""
    tp: int
    """Shards that divide them."""
    exchange_bytes: int
    """Memory that a rank needs for the exchange."""
    first: int = 0
    """Replica that the first of this server's is among those that divide the experts."""

    def own(self, place: Place) -> range:
        """The experts of a layer that a rank of this server holds."""
        replica = (self.first + place.replica) % self.dp
        return own_experts(self.moe.experts, self.dp * self.tp, replica * self.tp + place.shard)

    @property
    def held_by_replica(self) -> int:
        """How many experts of a layer the shards of one replica hold together, at most."""
        return -(-self.moe.experts // self.dp)


def check_experts(engine: EngineConfig, layout: Layout, spec: ModelSpec, member: ExternalMember | None = None) -> None:
    """Raises ConfigError where experts are to be divided and the model has none, or fewer than a stage has ranks.

    layout, member: as for plan_experts().
    """
    if not engine.expert_parallel:
        return
    if spec.moe is None:
        raise ConfigError("--expert-parallel is for models with experts and this model is dense; leave it out")
    dp = layout.dp if member is None else member.size
    ranks, experts = dp * layout.tp, spec.moe.experts
    if ranks > experts:
        replicas = f"--dp {dp}" if member is None else f"SIZE {dp} of --dp-external"
        raise ConfigError(
            f"--expert-parallel divides the {experts} experts of this model among {ranks} ranks of a stage "
            f"({replicas} times --tp {layout.tp}); write degrees whose product is {experts} or less"
        )


def plan_experts(
    computation: Computation,
    engine: EngineConfig,
    layout: Layout,
    spec: ModelSpec,
    member: ExternalMember | None = None,
) -> ExpertPlan | None:
    """The division of experts; None for a dense model and for ranks that hold all experts.

    layout: of this server. member: which one it is of servers that share experts; None where it shares none. Raises
    ConfigError for degrees that the model's experts do not fit.
    """
    check_experts(engine, layout, spec, member)
    if spec.moe is None or not (engine.expert_parallel or layout.tp > 1):
        return None
    item_bytes = ITEM_BYTES[computation.compute_dtype]
    replicas = layout.dp if member is None else member.size
    dp, tp = replicas if engine.expert_parallel else 1, layout.tp
    way: Way = "replicated"
    if engine.expert_parallel:
        way = choose_way(engine.exchange, spec.moe, dp=dp, tp=tp, device=computation.device)
    needed = exchange_bytes(
        way, spec.moe, spec.hidden_size, item_bytes, engine.pass_tokens, dp=dp, tp=tp,
        halved=engine.overlap and dp > 1,
    )  # fmt: skip
    return ExpertPlan(spec.moe, way, dp, tp, needed, first=member.rank if member is not None else 0)
