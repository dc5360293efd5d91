"""Model specification: the architecture of a decoder, read from a Hugging Face config.json.

Llama, Mistral, Qwen2, Qwen3 and models built as one of them (such as SmolLM2) differ in a few switches only: biases,
norms of the query and key heads, the rotary scaling. DeepSeek-V2 and -V3 have multi-head latent attention instead
(mla_spec.py); they, Qwen3-MoE and Mixtral have layers of experts (moe_spec.py). families.py says what differs between
families; ModelSpec names the switches, so that the rest of the engine does not depend on the family.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from headrace.core.types.errors import ConfigError, UnknownModel
from headrace.engine.model.config_fields import (
    ABOVE_ONE,
    COUNT,
    FLAG,
    LAYERS,
    NAME,
    NUMBER,
    OBJECT,
    POSITIVE,
    SIZE,
    Fields,
)
from headrace.engine.model.families import Family, family_of
from headrace.engine.model.library_spec import LibrarySpec
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.model.moe_spec import LayerKind, MoeSpec

RopeKind = Literal["default", "linear", "llama3", "yarn", "divisors"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (RoPE, arXiv 2104.09864) and its scaling to longer contexts."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    """Base of the frequencies."""
    factor: float = 1.0
    """By which the context is extended: new positions / original positions."""
    original_positions: int = 0
    """Positions of the context before it was extended."""
    low_freq_factor: float = 1.0
    """llama3: waves longer than original_positions / low_freq_factor are interpolated."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original_positions / high_freq_factor are kept."""
    attention_factor: float | None = None
    """yarn: scales cos and sin; None derives it from factor and the mscale values."""
    beta_fast: float = 32.0
    """yarn: frequencies with more rotations than this over the original context are kept."""
    beta_slow: float = 1.0
    """yarn: frequencies with fewer rotations than this are interpolated."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """yarn: with mscale, coefficients of the derived attention factor."""
    truncate: bool = True
    """yarn: round the bounds of the ramp to whole dimensions."""
    divisors: tuple[float, ...] = ()
    """divisors: what each of the head_dim / 2 frequencies is divided by, from a GGUF file (rope_freqs.weight)."""

    def __post_init__(self) -> None:
        """Raises ConfigError for factors that leave nothing between what is kept and what is interpolated."""
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope high_freq_factor {self.high_freq_factor} must be above low_freq_factor {self.low_freq_factor}"
            )

    def magnitude(self, mscale: float) -> float:
        """YaRN's growth of scores with the context (section 3.4 of its paper), for one of its coefficients."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SiLU-gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    layers: int
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    max_positions: int
    """Positions of the longest sequence by the model's configuration."""
    sliding_window: int | None = None
    """Positions that each token attends to; None attends to all. Sequences are limited to it, see position_limit."""
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    """Query, key and value projections have biases."""
    output_bias: bool = False
    """The attention output projection has a bias."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3)."""
    mla: MlaSpec | None = None
    """Multi-head latent attention; heads and kv_heads are then the same, head_dim is the width of a query head."""
    moe: MoeSpec | None = None
    """Layers of experts; None for a dense model."""
    library: LibrarySpec | None = None
    """The model is computed by transformers' modules; the fields above are then as it caches, and those of the
    arithmetic are not read."""
    state_bytes: int = 0
    """Of what each KV head of a layer keeps of a request whatever its length (stub models; others: see library)."""
    further_layers: int = 0
    """Layers behind the last one that predict further tokens (num_nextn_predict_layers); they are not read."""

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that contradict each other."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "max_positions": self.max_positions,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"the model says {name} {size}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Whether each layer's MLP is dense or made of experts."""
        dense: LayerKind = "dense"
        return (dense,) * self.layers if self.moe is None else self.moe.layer_kinds

    @property
    def position_limit(self) -> int:
        """Positions of the longest sequence that is computed exactly: up to the window, full attention equals sliding
        attention."""
        return min(self.max_positions, self.sliding_window or self.max_positions)

    @property
    def rotary_dim(self) -> int:
        """Width of a head that is rotated."""
        return self.mla.rope_dim if self.mla else self.head_dim

    def resolve_length(self, max_model_len: int) -> int:
        """max_model_len, or the model's limit for 0. Raises ConfigError when it is above the limit."""
        if max_model_len > self.position_limit:
            why = "its sliding window" if self.position_limit < self.max_positions else "its positions"
            raise ConfigError(
                f"max_model_len {max_model_len} is above {self.position_limit}, the limit that {why} set for this "
                f"model; write --max-model-len {self.position_limit} or less"
            )
        return max_model_len or self.position_limit


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Read a parsed config.json (of transformers 4 or 5). Raises UnknownModel for a model that our own layers do
    not compute, ConfigError for a value of the wrong type or range."""
    fields = Fields("config.json", config)
    family = family_of(fields)
    _refuse_unsupported(fields)
    heads = fields.get("num_attention_heads", SIZE)
    hidden = fields.get("hidden_size", SIZE)
    positions = fields.get("max_position_embeddings", SIZE)
    bias = fields.get("attention_bias", FLAG, False)
    rope = _rope(fields, positions)
    mla = _mla(fields, rope) if family.latent else None
    return ModelSpec(
        family=family.model_type,
        vocab_size=fields.get("vocab_size", SIZE),
        hidden_size=hidden,
        intermediate_size=fields.get("intermediate_size", SIZE),
        layers=fields.get("num_hidden_layers", LAYERS),
        heads=heads,
        kv_heads=heads if mla else fields.get("num_key_value_heads", SIZE, heads),
        head_dim=mla.query_dim if mla else fields.get("head_dim", SIZE, family.head_dim or hidden // heads),
        norm_eps=fields.get("rms_norm_eps", POSITIVE, family.norm_eps, nullable=False),
        rope=rope,
        max_positions=positions,
        sliding_window=_window(fields, family),
        tied=fields.get("tie_word_embeddings", FLAG, False),
        qkv_bias={"configured": bias, "always": True, "never": False}[family.qkv_bias],
        output_bias=family.output_bias and bias,
        qk_norm=family.qk_norm,
        mla=mla,
        moe=family.read_moe(fields) if family.read_moe is not None else None,
        further_layers=fields.get("num_nextn_predict_layers", COUNT, 0) if mla else 0,
    )


def _refuse_unsupported(config: Fields) -> None:
    activation = config.get("hidden_act", NAME, "silu")
    if activation != "silu":
        raise UnknownModel(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    if config.get("mlp_bias", FLAG, False):
        raise UnknownModel("mlp_bias true is not supported; supported are MLPs without bias")


def _window(config: Fields, family: Family) -> int | None:
    if family.window == "none":
        return None
    if family.window == "use_sliding_window" and not config.get("use_sliding_window", FLAG, False):
        return None
    if "sliding_window" not in config and family.default_window is not None:
        return family.default_window
    return config.optional("sliding_window", COUNT)


def _rope(config: Fields, positions: int) -> RopeSpec:
    """Read rope_parameters (transformers 5), or rope_theta with rope_scaling (transformers 4)."""
    scaling = config.within("rope_parameters" if config.get("rope_parameters", OBJECT, {}) else "rope_scaling")
    kind = scaling.get("rope_type", NAME, scaling.get("type", NAME, "default"))
    if kind not in ROPE_KINDS:
        raise UnknownModel(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
    partial = scaling.get("partial_rotary_factor", NUMBER, config.get("partial_rotary_factor", NUMBER, 1.0))
    if partial != 1.0:
        raise UnknownModel(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    original = scaling.get("original_max_position_embeddings", SIZE, positions)
    factors = {"default": 1.0, "yarn": positions / original}
    return RopeSpec(
        kind=cast(RopeKind, kind),
        theta=scaling.get("rope_theta", ABOVE_ONE, config.get("rope_theta", ABOVE_ONE, 10000.0)),
        factor=scaling.get("factor", POSITIVE, factors.get(kind)),
        original_positions=original,
        low_freq_factor=scaling.get("low_freq_factor", POSITIVE, 1.0),
        high_freq_factor=scaling.get("high_freq_factor", POSITIVE, 4.0),
        attention_factor=scaling.optional("attention_factor", POSITIVE),
        beta_fast=scaling.get("beta_fast", POSITIVE, 32.0),
        beta_slow=scaling.get("beta_slow", POSITIVE, 1.0),
        mscale=scaling.optional("mscale", NUMBER),
        mscale_all_dim=scaling.optional("mscale_all_dim", NUMBER),
        truncate=scaling.get("truncate", FLAG, True),
    )


def _mla(config: Fields, rope: RopeSpec) -> MlaSpec:
    """Latent attention of a DeepSeek model. Layers after num_hidden_layers (num_nextn_predict_layers), which predict
    further tokens, are not read."""
    if not config.get("rope_interleave", FLAG, True):
        raise UnknownModel("rope_interleave false is not supported; supported are rotary pairs side by side")
    return MlaSpec(
        kv_rank=config.get("kv_lora_rank", SIZE),
        nope_dim=config.get("qk_nope_head_dim", SIZE),
        rope_dim=config.get("qk_rope_head_dim", SIZE),
        value_dim=config.get("v_head_dim", SIZE),
        query_rank=config.get("q_lora_rank", COUNT, 0),
        score_factor=rope.magnitude(rope.mscale_all_dim) ** 2 if rope.kind == "yarn" and rope.mscale_all_dim else 1.0,
    )
