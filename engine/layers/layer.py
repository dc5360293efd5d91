"""One layer of a decoder, read from a checkpoint."""

from typing import NamedTuple

from torch import Tensor

from headrace.engine.collectives.base import Collectives
from headrace.engine.layers.base import AttentionBlock, MlpBlock
from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.exchange.base import Exchange
from headrace.engine.layers.grouped_attention import GroupedAttention
from headrace.engine.layers.moe import MoeMlp
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.sharding import Shard
from headrace.engine.model.weights import LayerReader


class Layer(NamedTuple):
    """A layer with pre-normalisation: x += attention(norm(x)), x += mlp(norm(x))."""

    input_norm: Tensor  # [hidden], of the RMSNorm before attention
    attention: AttentionBlock
    post_norm: Tensor  # [hidden], of the RMSNorm before the MLP
    mlp: MlpBlock


def load_layer(
    spec: ModelSpec, read: LayerReader, arithmetic: Arithmetic, shard: Shard, tp: Collectives, exchange: Exchange
) -> Layer:
    """Read a shard of a layer. tp: all its shards. exchange: for layers of experts. Raises ConfigError for a missing or
    misshapen tensor."""
    if spec.moe is not None and spec.layer_kinds[read.layer] == "moe":
        mlp: MlpBlock = MoeMlp(spec.moe, spec.hidden_size, read, arithmetic, exchange)
    else:
        mlp = DenseMlp(spec.hidden_size, spec.intermediate_size, read, arithmetic, shard.columns, tp)
    return Layer(
        input_norm=read.vector({"input_layernorm": spec.hidden_size}),
        attention=GroupedAttention(spec, read, arithmetic, shard, tp),
        post_norm=read.vector({"post_attention_layernorm": spec.hidden_size}),
        mlp=mlp,
    )
