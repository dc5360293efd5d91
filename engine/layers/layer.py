"""One layer of a decoder, read from a checkpoint."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.collectives.operations import Collectives
from headrace.engine.layers.base import AttentionBlock, MlpBlock
from headrace.engine.layers.dense_mlp import DenseMlp
from headrace.engine.layers.exchange import Exchange
from headrace.engine.layers.grouped_attention import GroupedAttention
from headrace.engine.layers.latent_attention import LatentAttentionBlock
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
    pauses: bool
    """Whether a half pauses while attention is summed over the shards. Not before an exchange: one turn of the other
    half hides one operation, and the exchange takes longer."""


def load_layer(
    spec: ModelSpec,
    read: LayerReader,
    arithmetic: Arithmetic,
    shard: Shard,
    tp: Collectives,
    exchanges: Sequence[Exchange],
    mla_form: MlaForm,
) -> Layer:
    """Read a shard of a layer. tp: all its shards. exchanges: for layers of experts, one for each half of passes that
    are cut. mla_form: of attention to latents, not "auto". Raises ConfigError for a missing or misshapen tensor."""
    attention: AttentionBlock
    if spec.mla is not None:
        attention = LatentAttentionBlock(spec, spec.mla, read, arithmetic, mla_form, shard.heads, tp)
    else:
        attention = GroupedAttention(spec, read, arithmetic, shard, tp)
    mlp: MlpBlock
    if spec.moe is not None and spec.layer_kinds[read.layer] == "moe":
        mlp = MoeMlp(spec.moe, spec.hidden_size, read, arithmetic, exchanges)
    else:
        mlp = DenseMlp(spec.hidden_size, spec.intermediate_size, read, arithmetic, shard.columns, tp)
    return Layer(
        input_norm=read.vector({"input_layernorm": spec.hidden_size}),
        attention=attention,
        post_norm=read.vector({"post_attention_layernorm": spec.hidden_size}),
        mlp=mlp,
        pauses=tp.size > 1 and not mlp.exchanges,
    )
