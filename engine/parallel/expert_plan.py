"""Which experts each rank of a stage holds, how the ranks exchange tokens for them, and the memory that it takes."""

from typing import NamedTuple

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ITEM_BYTES
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.types.ranks.layout import Layout, Place
from headrace.engine.device import resolve_computation
from headrace.engine.layers.exchange.ways import Way, choose_way, exchange_bytes, own_experts
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.moe_spec import MoeSpec


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
    model: ModelConfig, engine: EngineConfig, layout: Layout, spec: ModelSpec, member: ExternalMember | None = None
) -> ExpertPlan | None:
    """The division of experts; None for a dense model and for ranks that hold all experts.

    layout: of this server. member: which one it is of servers that share experts; None where it shares none. Raises
    ConfigError for degrees that the model's experts do not fit, and for a device or dtype that is not there.
    """
    check_experts(engine, layout, spec, member)
    if spec.moe is None or not (engine.expert_parallel or layout.tp > 1):
        return None
    computation = resolve_computation(model, engine.cpuinfo)
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
