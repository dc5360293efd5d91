"""config.json of GGUF models that transformers' modules compute: its fields by the metadata of each architecture.

What a file does not say is what llama.cpp takes for the architecture. A key that is not read here is refused by its
name: it would change what is computed.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from headrace.core.types.errors import ConfigError, first_of
from headrace.engine.model.config_fields import (
    ABOVE_ONE,
    COUNT,
    FLAG,
    LAYERS,
    NAME,
    NUMBER,
    POSITIVE,
    SIZE,
    Fields,
    Kind,
)
from headrace.engine.model.gguf_file import GgufFile
from headrace.engine.model.gguf_header import Length

T = TypeVar("T")
# Of an architecture: they do not change what is computed.
UNCOMPUTED = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
NO_ROPE_INTERVAL = 4  # of SmolLM3: every fourth layer has no rotation
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


class Keys:
    """Metadata below an architecture's name, of which those that are read are noted."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self._prefix = f"{architecture}."
        below = {
            key.removeprefix(self._prefix): value
            for key, value in file.metadata.items()
            if key.startswith(self._prefix)
        }
        self._values = Fields(file.name, below, self._prefix)
        self._unread = below.keys() - set(UNCOMPUTED)
        self._arrays = {key for key, value in below.items() if isinstance(value, Length)}

    def get(self, key: str, kind: Kind[T], default: T | None = None) -> T:
        """See Fields.get(). Raises ConfigError for an array, too: one value for each layer."""
        self._note(key)
        return self._values.get(key, kind, default)

    def optional(self, key: str, kind: Kind[T]) -> T | None:
        """See Fields.optional() and get()."""
        self._note(key)
        return self._values.optional(key, kind)

    def refuse_unread(self) -> None:
        """Raises ConfigError for keys that were not read."""
        if self._unread:
            named = first_of([f"{self._prefix}{key}" for key in sorted(self._unread)])
            raise ConfigError(f"{self.file.name} has keys that are not supported: {named}")

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of the first layer: attn_q.bias, for instance."""
        return f"blk.0.{tensor}" in self.file.tensors

    def _note(self, key: str) -> None:
        self._unread.discard(key)
        if key in self._arrays:
            raise ConfigError(
                f"{self.file.name}: {self._prefix}{key} differs from layer to layer, which is not supported"
            )


class GgufArchitecture(NamedTuple):
    """How files of an architecture differ from what transformers has."""

    config: Callable[[Keys, dict[str, Any]], dict[str, Any]]
    """Fields of config.json, model_type among them, beside the common ones, which it is given."""
    paired: bool = False
    """Rows of each query and key head are in the order of pairwise rotation."""
    raised_norms: bool = False
    """Norms are stored as 1 + w."""


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Fields of config.json. Raises ConfigError for an architecture or a key that is not supported, and for a key that
    is missing or has a value of the wrong type or range."""
    name = Fields(file.name, file.metadata).get("general.architecture", NAME)
    if name not in ARCHITECTURES:
        raise ConfigError(f"GGUF architecture {name!r} is not supported; supported are {', '.join(ARCHITECTURES)}")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError("tensor token_embd.weight is missing in the GGUF file")
    keys = Keys(file, name)
    common = _common(keys)
    config = common | ARCHITECTURES[name].config(keys, common)
    keys.refuse_unread()
    return config


def _common(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.get("embedding_length", SIZE), keys.get("attention.head_count", SIZE)
    epsilon = keys.get("attention.layer_norm_rms_epsilon", POSITIVE)
    return {
        "vocab_size": keys.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.get("feed_forward_length", SIZE),
        "num_hidden_layers": keys.get("block_count", LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", SIZE, heads),
        "head_dim": max(1, hidden // heads),
        "max_position_embeddings": keys.get("context_length", SIZE),
        "rms_norm_eps": float(f"{epsilon:.6g}"),  # stored as float32: 1e-05 reads 9.99…e-06
        "tie_word_embeddings": "output.weight" not in keys.file.tensors,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _heads(
    keys: Keys, common: dict[str, Any], rope: dict[str, Any] | None = None, *, partial: bool = False
) -> dict[str, Any]:
    """Width and rotation of heads. rope: as _rope() has it, which is asked without one. partial: rotations may be of a
    part of them."""
    width = keys.get("attention.key_length", SIZE, common["head_dim"])
    if (values := keys.get("attention.value_length", SIZE, width)) != width:
        raise ConfigError(f"{keys.file.name}: attention.value_length {values} must equal the key length {width}")
    rotated = keys.get("rope.dimension_count", SIZE, width)
    if rotated > width or (rotated != width and not partial):
        raise ConfigError(f"{keys.file.name}: rope.dimension_count {rotated} must equal the head size {width}")
    rope = _rope(keys) if rope is None else rope
    return {
        "head_dim": width,
        "rope_parameters": {**rope, "partial_rotary_factor": rotated / width} if partial else rope,
    }


def _rope(keys: Keys) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base", ABOVE_ONE, 10000.0)}
    kind = keys.get("rope.scaling.type", NAME, "none")
    factor = keys.optional("rope.scaling.factor", POSITIVE)
    original = keys.optional("rope.scaling.original_context_length", SIZE)
    if (scale := keys.get("rope.scaling.attn_factor", POSITIVE, 1.0)) != 1.0:
        raise ConfigError(f"{keys.file.name}: rope.scaling.attn_factor {scale:.6g} is not supported; supported is 1")
    if kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        return rope
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind != "yarn" or factor is None or original is None:
        raise ConfigError(
            f"{keys.file.name}: rope.scaling.type {kind!r} is not supported; supported are none, linear, and yarn with "
            "its factor and original_context_length"
        )
    return {
        **rope,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.get("rope.scaling.yarn_beta_fast", POSITIVE, 32.0),
        "beta_slow": keys.get("rope.scaling.yarn_beta_slow", POSITIVE, 1.0),
    }


def _experts(keys: Keys, count: str, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Sizes of routed experts. count, width: what the configuration calls their number, and their inner size."""
    experts, used, inner = (keys.get(key, SIZE) for key in EXPERT_KEYS)
    return {count: experts, "num_experts_per_tok": used, width: inner}


def _gemma(keys: Keys, common: dict[str, Any], largest: int) -> dict[str, Any]:
    """largest: layers of the family's largest model, whose scores have another scale."""
    heads = _heads(keys, common)
    wide = common["num_hidden_layers"] == largest
    return {
        **heads,
        "query_pre_attn_scalar": (
            common["hidden_size"] // common["num_attention_heads"] if wide else heads["head_dim"]
        ),
        "sliding_window": keys.get("attention.sliding_window", SIZE),
    }


def _gemma2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(keys, common, 46),
        "model_type": "gemma2",
        "attn_logit_softcapping": keys.get("attn_logit_softcapping", POSITIVE, 50.0),
        "final_logit_softcapping": keys.get("final_logit_softcapping", POSITIVE, 30.0),
    }


def _gemma3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    fields = _gemma(keys, common, 62)
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", ABOVE_ONE, 10000.0)}
    period = keys.get("attention.sliding_window_pattern", SIZE, 6)
    kinds = ["sliding_attention" if layer % period else "full_attention" for layer in _from_one(common)]
    return {
        **fields,
        "model_type": "gemma3_text",
        "layer_types": kinds,
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": keys.optional("final_logit_softcapping", POSITIVE),
    }


def _from_one(common: dict[str, Any]) -> range:
    """Numbers of the layers, counted from one."""
    return range(1, common["num_hidden_layers"] + 1)


def _llama(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    fields = {**_heads(keys, common), "attention_bias": keys.has("attn_q.bias")}
    if not keys.get("expert_count", COUNT, 0):
        keys.get("expert_used_count", COUNT, 0)
        return {**fields, "model_type": "llama"}
    keys.get("expert_feed_forward_length", COUNT, 0)
    experts, used = (keys.get(key, SIZE) for key in EXPERT_KEYS[:2])
    return {
        **fields,
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "sliding_window": keys.optional("attention.sliding_window", SIZE),
    }


def _qwen2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**_heads(keys, common), "model_type": "qwen2"}


def _qwen3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {**_heads(keys, common), "model_type": "qwen3", "attention_bias": keys.has("attn_q.bias")}


def _qwen2moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(keys, common),
        **_experts(keys, "num_experts"),
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length", SIZE),
        "norm_topk_prob": False,
    }


def _qwen3moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(keys, common),
        **_experts(keys, "num_experts"),
        "model_type": "qwen3_moe",
        "attention_bias": keys.has("attn_q.bias"),
        "norm_topk_prob": True,
    }


def _routed(keys: Keys, scores: int) -> dict[str, Any]:
    """Routing of DeepSeek's kind. scores: what expert_gating_func has to be."""
    if (found := keys.get("expert_gating_func", SIZE, scores)) != scores:
        raise ConfigError(f"{keys.file.name}: expert_gating_func {found} is not supported; supported is {scores}")
    groups = keys.get("expert_group_count", SIZE, 1)
    return {
        **_experts(keys, "n_routed_experts"),
        "n_shared_experts": keys.get("expert_shared_count", COUNT, 0),
        "first_k_dense_replace": keys.get("leading_dense_block_count", COUNT, 0),
        "norm_topk_prob": keys.get("expert_weights_norm", FLAG, False),
        "routed_scaling_factor": keys.get("expert_weights_scale", POSITIVE, 1.0),
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count", SIZE, groups),
    }


def _deepseek2(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V2 and -V3, and Kimi K2: by how experts are scored."""
    scores = keys.get("expert_gating_func", SIZE, SOFTMAX)
    rope_dim, rank = keys.get("rope.dimension_count", SIZE), keys.get("attention.kv_lora_rank", SIZE)
    # Of the latents, in files whose kv_b is split; of heads in older ones.
    widths = keys.get("attention.key_length", SIZE), keys.get("attention.value_length", SIZE)
    key_length = keys.get("attention.key_length_mla", SIZE, widths[0])
    value_length = keys.get("attention.value_length_mla", SIZE, widths[1])
    if key_length <= rope_dim:
        raise ConfigError(f"{keys.file.name}: keys of {key_length} must be wider than the rotated {rope_dim}")
    rope = _rope(keys)
    if multiplier := keys.get("rope.scaling.yarn_log_multiplier", NUMBER, 0.0):
        scale = float(f"{multiplier / 0.1:.6g}")  # of DeepSeek's files, a tenth of it
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    routed = _routed(keys, scores if scores in (SOFTMAX, SIGMOID) else SIGMOID)
    v2 = {"topk_method": "greedy" if routed["n_group"] == 1 else "group_limited_greedy"} if scores == SOFTMAX else {}
    return {
        **routed,
        **v2,
        "model_type": "deepseek_v2" if scores == SOFTMAX else "deepseek_v3",
        "num_key_value_heads": common["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": keys.optional("attention.q_lora_rank", SIZE),
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key_length - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_length,
        "rope_parameters": rope,
    }


def _gpt_oss(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    heads = _heads(keys, common)
    if heads["rope_parameters"]["rope_type"] == "yarn":
        heads["rope_parameters"]["truncate"] = False  # as published; files do not say it
    return {
        **heads,
        **_experts(keys, "num_local_experts", "intermediate_size"),
        "model_type": "gpt_oss",
        "sliding_window": keys.get("attention.sliding_window", SIZE),
        "layer_types": ["sliding_attention" if layer % 2 else "full_attention" for layer in _from_one(common)],
    }


def _phi3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    original = keys.get("rope.scaling.original_context_length", SIZE, common["max_position_embeddings"])
    factors = all(name in keys.file.tensors for name in ROPE_FACTORS)
    return {
        **_heads(keys, common, _longrope(keys, common, original) if factors else _rope(keys), partial=True),
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": keys.get("attention.sliding_window", COUNT, 0) or None,
    }


def _longrope(keys: Keys, common: dict[str, Any], original: int) -> dict[str, Any]:
    """original: positions that the model had before its rotations were stretched."""
    if (kind := keys.get("rope.scaling.type", NAME, "longrope")) not in ("longrope", "none"):
        raise ConfigError(f"{keys.file.name}: rope.scaling.type {kind!r} must be 'longrope' beside {ROPE_FACTORS[0]}")
    stretch = common["max_position_embeddings"] / original
    expected = math.sqrt(1 + math.log(stretch) / math.log(original)) if min(stretch, original) > 1 else 1.0
    if abs((scale := keys.get("rope.scaling.attn_factor", POSITIVE, 1.0)) - expected) > 1e-3:
        raise ConfigError(f"{keys.file.name}: rope.scaling.attn_factor {scale:.6g} should be {expected:.6g}")
    keys.optional("rope.scaling.factor", POSITIVE)  # as the numbers of positions say it
    long, short = ([float(each) for each in keys.file.read(name).reshape(-1)] for name in ROPE_FACTORS)
    return {
        "rope_type": "longrope",
        "rope_theta": keys.get("rope.freq_base", ABOVE_ONE, 10000.0),
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": original,
    }


def _mistral3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    """Ministral 3, and Mistral Small 3, which has no scaling."""
    heads = _heads(keys, common)
    beta = keys.optional("attention.temperature_scale", POSITIVE)
    multiplier = keys.optional("rope.scaling.yarn_log_multiplier", NUMBER)
    rope = heads["rope_parameters"]
    if rope["rope_type"] != "yarn" or beta is None:
        if beta or multiplier:
            raise ConfigError(f"{keys.file.name}: attention.temperature_scale and yarn have to be there together")
        return {**heads, "model_type": "mistral", "sliding_window": keys.optional("attention.sliding_window", SIZE)}
    if multiplier:
        rope |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    rope |= {
        "llama_4_scaling_beta": float(f"{beta:.6g}"),
        "max_position_embeddings": common["max_position_embeddings"],
    }
    return {**heads, "model_type": "ministral3", "sliding_window": None}


def _smollm3(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(keys, common),
        "model_type": "smollm3",
        "attention_bias": keys.has("attn_q.bias"),
        "no_rope_layers": [int(layer % NO_ROPE_INTERVAL != 0) for layer in _from_one(common)],
        "use_sliding_window": False,
    }


def _glm4(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    return {
        **_heads(keys, common, partial=True),
        "model_type": "glm4",
        "attention_bias": keys.has("attn_q.bias"),
    }


def _glm4moe(keys: Keys, common: dict[str, Any]) -> dict[str, Any]:
    further = keys.get("nextn_predict_layers", COUNT, 0)
    if further >= common["num_hidden_layers"]:
        raise ConfigError(f"{keys.file.name}: nextn_predict_layers {further} must be below block_count")
    return {
        **_heads(keys, common, partial=True),
        **_routed(keys, SIGMOID),
        "model_type": "glm4_moe",
        "num_hidden_layers": common["num_hidden_layers"] - further,
        "attention_bias": keys.has("attn_q.bias"),
        "use_qk_norm": keys.has("attn_q_norm.weight"),
    }


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(_llama, paired=True),
    "qwen2": GgufArchitecture(_qwen2),
    "qwen3": GgufArchitecture(_qwen3),
    "qwen2moe": GgufArchitecture(_qwen2moe),
    "qwen3moe": GgufArchitecture(_qwen3moe),
    "gemma2": GgufArchitecture(_gemma2, raised_norms=True),
    "gemma3": GgufArchitecture(_gemma3, raised_norms=True),
    "deepseek2": GgufArchitecture(_deepseek2),
    "gpt-oss": GgufArchitecture(_gpt_oss),
    "phi3": GgufArchitecture(_phi3),
    "mistral3": GgufArchitecture(_mistral3, paired=True),
    "smollm3": GgufArchitecture(_smollm3, paired=True),
    "glm4": GgufArchitecture(_glm4),
    "glm4moe": GgufArchitecture(_glm4moe),
}
