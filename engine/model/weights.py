"""Weights of a stage, fused while loading: query, key and value in one matrix, gate and up in another."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.engine.dtypes import Precision
from headrace.engine.model.checkpoint import Checkpoint
from headrace.engine.model.config import ModelSpec


class LayerWeights(NamedTuple):
    """Weights of one layer. Shapes are those before Arithmetic.pack(), which packs the four matrices."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden], packed
    qkv_bias: Tensor | None  # [(heads + 2 * kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, heads * head_dim], packed
    output_bias: Tensor | None  # [hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden], packed
    down: Tensor  # [hidden, intermediate], packed


class HeadWeights(NamedTuple):
    """Weights outside the layers; empty tensors on stages that do not use them."""

    embedding: Tensor  # [vocabulary, hidden]
    norm: Tensor  # [hidden], of the final RMSNorm
    head: Tensor  # [vocabulary, hidden]


def load_layer(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    layer: int,
    precision: Precision,
    pack: Callable[[Tensor], Tensor],
    device: str,
) -> LayerWeights:
    """Read the weights of a layer, counted from the model's first. pack: Arithmetic.pack. Raises ConfigError for a
    missing or misshapen tensor."""
    prefix = f"model.layers.{layer}"
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def fused(parts: dict[str, int], kind: str, *columns: int) -> Tensor:
        whole = torch.empty((sum(parts.values()), *columns), dtype=precision.held, device=device)
        start = 0
        for name, rows in parts.items():
            read = checkpoint.read(f"{prefix}.{name}.{kind}", (rows, *columns))
            whole[start : start + rows] = read.to(precision.model)
            start += rows
        return whole

    attention = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    return LayerWeights(
        input_norm=fused({"input_layernorm": hidden}, "weight"),
        qkv=pack(fused(attention, "weight", hidden)),
        qkv_bias=fused(attention, "bias") if spec.qkv_bias else None,
        q_norm=fused({"self_attn.q_norm": spec.head_dim}, "weight") if spec.qk_norm else None,
        k_norm=fused({"self_attn.k_norm": spec.head_dim}, "weight") if spec.qk_norm else None,
        output=pack(fused({"self_attn.o_proj": hidden}, "weight", query)),
        output_bias=fused({"self_attn.o_proj": hidden}, "bias") if spec.output_bias else None,
        post_norm=fused({"post_attention_layernorm": hidden}, "weight"),
        gate_up=pack(fused({"mlp.gate_proj": inner, "mlp.up_proj": inner}, "weight", hidden)),
        down=pack(fused({"mlp.down_proj": hidden}, "weight", inner)),
    )


def load_head(
    spec: ModelSpec, checkpoint: Checkpoint, *, first: bool, last: bool, precision: Precision, device: str
) -> HeadWeights:
    """Read the embedding for the first stage, norm and head for the last; a tied head is the embedding itself.

    Raises ConfigError for a missing or misshapen tensor.
    """
    nothing = torch.empty(0, dtype=precision.held, device=device)
    table = (spec.vocab_size, spec.hidden_size)

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        rounded = checkpoint.read(name, shape).to(precision.model)
        return rounded.to(device=device, dtype=precision.held, copy=True)  # a copy, so that the file can be unmapped

    embedding = read("model.embed_tokens.weight", table) if first or (last and spec.tied) else nothing
    if not last:
        return HeadWeights(embedding, nothing, nothing)
    head = embedding if spec.tied else read("lm_head.weight", table)
    return HeadWeights(embedding, read("model.norm.weight", (spec.hidden_size,)), head)
