"""Writes models of the zoo as GGUF files, with the keys and in the forms that llama.cpp's converter has for them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf.tensor_mapping import get_tensor_name_map
from torch import Tensor

from tests.engine.gguf_files import write_gguf
from tests.models.architectures import WINDOW

Values = dict[str, Any]
EXPERTS = "mlp.experts."
ROUTER = "ffn_gate_inp"
SHARED_GATE = "mlp.shared_expert_gate.weight"
ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
SCALED = "rope.scaling."


class Form(NamedTuple):
    """How models of an architecture are written."""

    architecture: str
    keys: Callable[[Any], Values] = lambda _: {}
    """Of the architecture, of the model's configuration."""
    paired: bool = False
    """Rows of query and key heads are written for pairwise rotation."""
    others: Mapping[str, Any] = MappingProxyType({})
    """Fields of the configuration in place of the zoo's: what the format takes for granted."""
    extra: Callable[[Any], dict[str, Tensor]] = lambda _: {}
    """Tensors that are part of the configuration."""


def experts(config: Any) -> Values:
    number = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return {"expert_count": number, "expert_used_count": config.num_experts_per_tok}


def wide(config: Any) -> Values:
    return {**experts(config), "expert_feed_forward_length": config.moe_intermediate_size}


def gemma2(config: Any) -> Values:
    return {
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": WINDOW,
    }


def gemma3(config: Any) -> Values:
    return {
        "attention.sliding_window": WINDOW,
        "attention.sliding_window_pattern": 4,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        f"{SCALED}type": "linear",
        f"{SCALED}factor": 8.0,
    }


def gpt_oss(config: Any) -> Values:
    rope = config.rope_parameters
    return {
        **experts(config),
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": WINDOW,
        f"{SCALED}type": "yarn",
        f"{SCALED}factor": rope["factor"],
        f"{SCALED}original_context_length": rope["original_max_position_embeddings"],
    }


def routed(config: Any) -> Values:
    """Experts of DeepSeek's kind."""
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 1 if config.model_type == "deepseek_v2" else 2,
    }


def latents(config: Any) -> Values:
    """kv_b in two, as files have it since latents are attended to as they are."""
    rope = config.rope_parameters
    yarn = {
        f"{SCALED}type": "yarn",
        f"{SCALED}factor": rope.get("factor"),
        f"{SCALED}original_context_length": rope.get("original_max_position_embeddings"),
        f"{SCALED}yarn_log_multiplier": 0.1 * rope.get("mscale_all_dim", 0.0),
    }
    nope, rotated, values = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    return {
        **routed(config),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": nope + rotated,
        "attention.value_length_mla": values,
        "rope.dimension_count": rotated,
        **(yarn if rope["rope_type"] == "yarn" else {}),
    }


def older_latents(config: Any) -> Values:
    """kv_b whole."""
    keys = latents(config)
    keys["attention.head_count_kv"] = config.num_attention_heads
    for each in ("key", "value"):
        keys[f"attention.{each}_length"] = keys.pop(f"attention.{each}_length_mla")
    return keys


def ministral3(config: Any) -> Values:
    rope = config.rope_parameters
    return {
        f"{SCALED}type": "yarn",
        f"{SCALED}factor": rope["factor"],
        f"{SCALED}original_context_length": rope["original_max_position_embeddings"],
        f"{SCALED}yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def phi3(config: Any) -> Values:
    return {"rope.dimension_count": partial(config), "attention.sliding_window": config.sliding_window or 0}


def longrope(config: Any) -> Values:
    original = config.original_max_position_embeddings
    stretch = config.max_position_embeddings / original
    scale = float(np.sqrt(1 + np.log(stretch) / np.log(original)))
    return {**phi3(config), f"{SCALED}original_context_length": original, f"{SCALED}attn_factor": scale}


def rope_factors(config: Any) -> dict[str, Tensor]:
    rope = config.rope_parameters
    return {f"rope_factors_{each}.weight": torch.tensor(rope[f"{each}_factor"]) for each in ("long", "short")}


def partial(config: Any) -> int:
    return int(width(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def glm(config: Any) -> Values:
    return {"rope.dimension_count": partial(config)}


def width(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MINISTRAL = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 512,
}  # fmt: skip
FORMS = {
    "gemma2": Form("gemma2", gemma2),
    "gemma3": Form("gemma3", gemma3, others={"rope_parameters": LINEAR}),
    "qwen3-moe": Form("qwen3moe", wide),
    "qwen2-moe": Form("qwen2moe", lambda config: {**wide(config), "expert_shared_feed_forward_length": 32}),
    "mixtral": Form("llama", experts, paired=True),
    "gpt-oss": Form("gpt-oss", gpt_oss),
    "phi3": Form("phi3", phi3),
    "phi4-mini": Form("phi3", longrope, extra=rope_factors),
    "ministral3": Form("mistral3", ministral3, paired=True, others={"rope_parameters": MINISTRAL}),
    "mistral": Form("mistral3", paired=True),
    "smollm3": Form("smollm3", paired=True),
    "deepseek-v2": Form("deepseek2", older_latents),
    "deepseek-v3": Form("deepseek2", latents),
    "kimi-k2": Form("deepseek2", latents),
    "glm4": Form("glm4", glm),
    "glm4.5": Form("glm4moe", lambda config: {**glm(config), **routed(config)}),
}


def publish(
    path: Path,
    model: Any,
    form: Form,
    kind: GGMLQuantizationType | None = None,
    keys: Values | None = None,
    tensors: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> None:
    """Write a model. kind: of matrices; the model gets the weights that the file has then. keys: in place of the
    form's, None for no such key. tensors: what becomes of those that would be written."""
    config = model.config.get_text_config()
    found = {**gguf_tensors(model, form), **form.extra(config)}
    written: dict[str, Any] = {name: tensor.float().contiguous().numpy() for name, tensor in found.items()}
    if kind is not None:
        for name, array in written.items():
            if array.ndim > 1 and name.endswith(".weight") and ROUTER not in name:
                written[name] = (quantize(array, kind), kind)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith(("_bias", "gate.weight", "router.weight")):
                turned = form.architecture == "gpt-oss" and EXPERTS in name
                weight = parameter.data.transpose(1, 2) if turned else parameter.data
                stood_for = rounded(weight, kind)
                parameter.data = stood_for.transpose(1, 2) if turned else stood_for
    every = {**common(config), **form.keys(config), **(keys or {})}
    write_gguf(
        path,
        form.architecture,
        {key: value for key, value in every.items() if value is not None},
        tensors(written),
    )


def rounded(weight: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """A weight as a file of this kind has it."""
    return torch.from_numpy(dequantize(quantize(weight.contiguous().numpy(), kind), kind))


def common(config: Any) -> Values:
    theta = config.rope_parameters.get("rope_theta")
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": width(config),
        "attention.value_length": width(config),
        "vocab_size": config.vocab_size,
    }
    return keys if theta is None else {**keys, "rope.freq_base": float(theta)}


def gguf_tensors(model: Any, form: Form) -> dict[str, Tensor]:
    """A model's tensors as the converter names and changes them."""
    config = model.config.get_text_config()
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == form.architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        within = name.split(".", 3)[-1] if ".layers." in name else name
        block = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        if within.startswith(EXPERTS):
            found.update({block + part: each for part, each in split_experts(within, tensor, form).items()})
        elif within == "self_attn.kv_b_proj.weight" and form.keys is latents:
            heads = tensor.view(config.num_attention_heads, -1, tensor.shape[-1])
            found[f"{block}attn_k_b.weight"] = heads[:, : config.qk_nope_head_dim].transpose(1, 2)
            found[f"{block}attn_v_b.weight"] = heads[:, config.qk_nope_head_dim :]
        else:
            own = {ROUTER_BIAS: "exp_probs_b.bias", "self_attn.sinks": "attn_sinks.weight"}
            short = own.get(within, "ffn_gate_inp_shexp.weight" if within == SHARED_GATE else "")
            known = block + short if short else names.get_name(name, (".weight", ".bias"))
            assert known is not None, name
            found[known] = changed(within, tensor, form, config).squeeze()
    return found


def changed(within: str, tensor: Tensor, form: Form, config: Any) -> Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = within.split(".")[-2]
    if form.paired and module in heads:
        return tensor.view(heads[module], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if form.architecture.startswith("gemma") and within.endswith("norm.weight"):
        return tensor + 1
    return tensor


def split_experts(within: str, tensor: Tensor, form: Form) -> dict[str, Tensor]:
    """Gates and values apart; of gpt-oss, where they come in turns, and its matrices are [inputs, outputs]."""
    ending = "bias" if within.endswith("_bias") else "weight"
    turned = form.architecture == "gpt-oss"
    stored = tensor.transpose(1, 2) if turned and ending == "weight" else tensor
    if "down_proj" in within:
        return {f"ffn_down_exps.{ending}": stored}
    gate, up = (stored[:, 0::2], stored[:, 1::2]) if turned else stored.chunk(2, 1)
    return {f"ffn_gate_exps.{ending}": gate, f"ffn_up_exps.{ending}": up}
