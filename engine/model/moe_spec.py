"""Mixture-of-experts (MoE) layers of a model, read from a Hugging Face config.json.

The routers of Qwen3-MoE, Mixtral, DeepSeek-V2 and DeepSeek-V3 differ in how scores are made, which experts may be
chosen, and how the chosen ones are weighted. MoeSpec names those switches, so that routing and expert layers do not
depend on the family.
"""

from typing import Literal

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.engine.model.config_fields import COUNT, COUNTS, FLAG, LAYERS, NAME, POSITIVE, SIZE, Fields

LayerKind = Literal["dense", "moe"]


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Experts and router of a model's MoE layers; all of them are alike."""

    experts: int
    """Routed experts of a layer."""
    top_k: int
    """Experts chosen for each token."""
    intermediate_size: int
    """Width of each routed expert."""
    layer_kinds: tuple[LayerKind, ...]
    """Of every layer of the model. Dense layers have an MLP of ModelSpec.intermediate_size."""
    shared_size: int = 0
    """Width of the shared experts, joined to one MLP that every token goes through; 0 without."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits, in float32."""
    float32_logits: bool = False
    """Router logits are a product in float32; else in the dtype of computation."""
    choice_bias: bool = False
    """A bias (e_score_correction_bias) is added to scores for the choice of experts, not for their weights."""
    groups: int = 1
    """Consecutive groups of experts; only experts of the best top_groups groups are chosen."""
    top_groups: int = 1
    group_score: Literal["maximum", "two best"] = "maximum"
    """What groups are chosen by: their best score, or the sum of their two best."""
    normalized: bool = False
    """The weights of a token's experts are divided by their sum."""
    scaling: float = 1.0
    """Factor on the weights."""
    rounded_weights: bool = False
    """Weights are rounded to the dtype of the logits."""
    module: Literal["mlp", "block_sparse_moe"] = "mlp"
    """Name of the module in a checkpoint, below its layer."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that contradict each other."""
        for name, size in (
            ("experts", self.experts),
            ("experts per token", self.top_k),
            ("expert width", self.intermediate_size),
            ("expert groups", self.groups),
            ("expert groups per token", self.top_groups),
        ):
            if size < 1:
                raise ConfigError(f"the model says {name} {size}; it must be at least 1")
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ConfigError(f"{self.top_groups} of {self.groups} groups cannot be chosen of {self.experts} experts")
        in_group = self.experts // self.groups
        if self.group_score == "two best" and in_group < 2:
            raise ConfigError(f"{self.groups} groups of {self.experts} experts have no two best each")
        if self.top_k > self.top_groups * in_group:
            raise ConfigError(f"{self.top_k} experts per token cannot be chosen of {self.top_groups * in_group}")

    @property
    def projections(self) -> tuple[str, str, str]:
        """Names of an expert's gate, up and down projection in a checkpoint."""
        return ("w1", "w3", "w2") if self.module == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")

    def stored_weights(self, hidden: int, experts: int | None = None) -> int:
        """Weights of the linear layers of an MoE layer, apart from the router. hidden: hidden size. experts: how many
        routed ones are held; None for all."""
        held = self.experts if experts is None else experts
        return 3 * hidden * (held * self.intermediate_size + self.shared_size)

    def active_weights(self, hidden: int) -> int:
        """Weights that one token is multiplied with in an MoE layer, router included."""
        return hidden * (3 * (self.top_k * self.intermediate_size + self.shared_size) + self.experts)

    def router_weights(self, hidden: int) -> int:
        """Weights of a layer's router."""
        return self.experts * (hidden + self.choice_bias)


def read_mixtral_moe(config: Fields) -> MoeSpec:
    """MoE layers of Mixtral. Raises ConfigError for a value of the wrong type."""
    return MoeSpec(
        experts=config.get("num_local_experts", SIZE, 8),
        top_k=config.get("num_experts_per_tok", SIZE, 2),
        intermediate_size=config.get("intermediate_size", SIZE),
        layer_kinds=tuple(_kind(True) for _ in _layers(config)),
        normalized=True,
        module="block_sparse_moe",
    )


def read_qwen3_moe(config: Fields) -> MoeSpec:
    """MoE layers of Qwen3-MoE. Raises ConfigError for a value of the wrong type."""
    dense = config.get("mlp_only_layers", COUNTS, [])
    step = config.get("decoder_sparse_step", SIZE, 1)
    key = "num_experts" if config.optional("num_experts", SIZE) else "num_local_experts"  # transformers 4, and 5
    return MoeSpec(
        experts=config.get(key, SIZE),
        top_k=config.get("num_experts_per_tok", SIZE, 8),
        intermediate_size=config.get("moe_intermediate_size", SIZE),
        layer_kinds=tuple(_kind(layer not in dense and (layer + 1) % step == 0) for layer in _layers(config)),
        normalized=config.get("norm_topk_prob", FLAG, False),
        rounded_weights=True,
    )


def read_deepseek_v2_moe(config: Fields) -> MoeSpec | None:
    """MoE layers of DeepSeek-V2; None for a dense model. Raises ConfigError for routing that the engine cannot do."""
    return _deepseek(config, ("greedy", "group_limited_greedy"), "softmax", newer=False)


def read_deepseek_v3_moe(config: Fields) -> MoeSpec | None:
    """MoE layers of DeepSeek-V3; None for a dense model. Raises ConfigError for routing that the engine cannot do."""
    return _deepseek(config, ("noaux_tc",), "sigmoid", newer=True)


def _deepseek(
    config: Fields, methods: tuple[str, ...], scores: Literal["softmax", "sigmoid"], *, newer: bool
) -> MoeSpec | None:
    if not config.optional("n_routed_experts", SIZE):
        return None
    family = f"deepseek_v{3 if newer else 2}"
    method = config.get("topk_method", NAME, methods[0])
    if method not in methods:
        raise ConfigError(f"topk_method {method!r} is not supported; supported for {family} is {' or '.join(methods)}")
    if (found := config.get("scoring_func", NAME, scores)) != scores:
        raise ConfigError(f"scoring_func {found!r} is not supported; supported for {family} is {scores!r}")
    normalized = config.get("norm_topk_prob", FLAG, newer)
    if normalized and not newer:
        raise ConfigError("norm_topk_prob true is not supported for deepseek_v2: implementations of it disagree")
    step = config.get("moe_layer_freq", SIZE, 1)
    first = config.get("first_k_dense_replace", COUNT, 3 if newer else 0)
    grouped = method != "greedy"
    width = config.get("moe_intermediate_size", SIZE, 2048 if newer else 1407)
    return MoeSpec(
        experts=config.get("n_routed_experts", SIZE),
        top_k=config.get("num_experts_per_tok", SIZE, 8 if newer else None),
        intermediate_size=width,
        layer_kinds=tuple(_kind(layer >= first and layer % step == 0) for layer in _layers(config)),
        shared_size=width * config.get("n_shared_experts", COUNT, 0),
        scores=scores,
        float32_logits=True,
        choice_bias=newer,
        groups=config.get("n_group", SIZE, 8 if newer else 1) if grouped else 1,
        top_groups=config.get("topk_group", SIZE, 4 if newer else 1) if grouped else 1,
        group_score="two best" if newer else "maximum",
        normalized=normalized,
        scaling=config.get("routed_scaling_factor", POSITIVE, 2.5 if newer else 1.0),
    )


def _layers(config: Fields) -> range:
    return range(config.get("num_hidden_layers", LAYERS))


def _kind(routed: bool) -> LayerKind:
    return "moe" if routed else "dense"
