"""One layer of a decoder, read from a checkpoint."""

from typing import NamedTuple

from torch import Tensor

from headrace.engine.collectives.base import Collectives
from headrace.engine.layers.base import AttentionBlock, MlpBlock
from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.grouped_attention import GroupedAttention
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


def load_layer(spec: ModelSpec, read: LayerReader, arithmetic: Arithmetic, shard: Shard, tp: Collectives) -> Layer:
    """Read a shard of a layer. tp: all its shards. Raises ConfigError for a missing or misshapen tensor."""
    return Layer(
        input_norm=read.vector({"input_layernorm": spec.hidden_size}),
        attention=GroupedAttention(spec, read, arithmetic, shard, tp),
        post_norm=read.vector({"post_attention_layernorm": spec.hidden_size}),
        mlp=DenseMlp(spec.hidden_size, spec.intermediate_size, read, arithmetic, shard.columns, tp),
    )
