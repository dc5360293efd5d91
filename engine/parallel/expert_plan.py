"""Which experts each rank of a stage holds, how the ranks exchange tokens for them, and the memory that it takes."""

from typing import NamedTuple

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.types.errors import ConfigError
from headrace.core.types.geometry import ITEM_BYTES
from headrace.core.types.layout import Layout, Place
from headrace.engine.device import computes_in, resolve_device, resolve_dtype
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

    def own(self, place: Place) -> range:
        """The experts of a layer that a rank holds."""
        return own_experts(self.moe.experts, self.dp * self.tp, place.replica % self.dp * self.tp + place.shard)

    @property
    def held_by_replica(self) -> int:
        """How many experts of a layer the shards of one replica hold together, at most."""
        return -(-self.moe.experts // self.dp)


def check_experts(engine: EngineConfig, layout: Layout, spec: ModelSpec) -> None:
    """Raises ConfigError where experts are to be divided and the model has none, or fewer than a stage has ranks."""
    if not engine.expert_parallel:
        return
    if spec.moe is None:
        raise ConfigError("--expert-parallel is for models with experts and this model is dense; leave it out")
    ranks, experts = layout.dp * layout.tp, spec.moe.experts
    if ranks > experts:
        raise ConfigError(
            f"--expert-parallel divides the {experts} experts of this model among {ranks} ranks of a stage "
            f"(--dp {layout.dp} times --tp {layout.tp}); write degrees whose product is {experts} or less"
        )


def plan_experts(model: ModelConfig, engine: EngineConfig, layout: Layout, spec: ModelSpec) -> ExpertPlan | None:
    """The division of experts; None for a dense model and for ranks that hold all experts.

    Raises ConfigError for degrees that the model's experts do not fit, and for a device or dtype that is not there.
    """
    check_experts(engine, layout, spec)
    if spec.moe is None or not (engine.expert_parallel or layout.tp > 1):
        return None
    device = resolve_device(model.device)
    dtype = resolve_dtype(model.dtype, device, engine.cpuinfo)
    native = computes_in(dtype, device, model.quantize, engine.cpuinfo)
    item_bytes = ITEM_BYTES[dtype if native else "float32"]
    dp, tp = layout.dp if engine.expert_parallel else 1, layout.tp
    way: Way = "replicated"
    if engine.expert_parallel:
        way = choose_way(engine.exchange, spec.moe, dp=dp, tp=tp, device=device)
    halved = engine.overlap and dp > 1
    needed = exchange_bytes(
        way, spec.moe, spec.hidden_size, item_bytes, engine.pass_tokens, dp=dp, tp=tp, halved=halved
    )
    return ExpertPlan(spec.moe, way, dp, tp, needed)
