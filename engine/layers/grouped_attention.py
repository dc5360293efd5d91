"""Grouped-query attention (GQA, arXiv 2305.13245) of the Llama family, with query, key and value in one product."""

from torch import Tensor

from headrace.engine.attention.paged import AttentionPass
from headrace.engine.collectives.operations import Collectives, Done, Pending
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.lora import AdaptedLinear, Groups
from headrace.engine.model.arithmetic import Arithmetic, HeadRules, Rows, Stream
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.sharding import Shard
from headrace.engine.model.weights import LayerReader


class GroupedAttention:
    """Attention block whose query heads share KV heads in groups; optional biases and norms of query and key heads.

    A shard has the rows of its heads of the query, key and value projections, and their columns of the output
    projection; the outputs of all shards are summed.
    """

    def __init__(
        self, spec: ModelSpec, read: LayerReader, arithmetic: Arithmetic, shard: Shard, tp: Collectives
    ) -> None:
        """Read the weights. tp: the shards of this layer. Raises ConfigError for a missing or misshapen tensor."""
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        projections = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        of_query, of_kv = _rows(shard.heads, spec.head_dim), _rows(shard.kv_heads, spec.head_dim)
        rows = {"self_attn.q_proj": of_query, "self_attn.k_proj": of_kv, "self_attn.v_proj": of_kv}
        output = {"self_attn.o_proj": spec.hidden_size}
        self._tp = tp
        self.shards = tp.size
        qkv = read.matrix(projections, spec.hidden_size, rows=rows)  # [(heads + 2 * kv_heads) * head_dim, hidden]
        qkv_bias = read.vector(projections, "bias", rows=rows) if spec.qkv_bias else None
        self.qkv = AdaptedLinear(arithmetic, qkv, qkv_bias, read.deltas(projections, rows=rows))
        q_norm, k_norm = (
            read.vector({f"self_attn.{name}": spec.head_dim}) if spec.qk_norm else None for name in ("q_norm", "k_norm")
        )
        self.rules = HeadRules(len(shard.heads), len(shard.kv_heads), q_norm, k_norm, spec.norm_eps)
        matrix = read.matrix(output, query, columns=of_query)  # [hidden, heads * head_dim]
        bias = read.vector(output, "bias") if spec.output_bias and shard.first else None  # added once
        self.output = AdaptedLinear(arithmetic, matrix, bias, read.deltas(output, columns=of_query))

    def post(
        self,
        layer: int,
        normed: Rows,
        rotary: Rotary,
        attention: AttentionPass,
        groups: Groups = (),
        hidden: Tensor | None = None,
    ) -> Pending | Stream:
        """See AttentionBlock."""
        query = self.rules.query_heads
        heads = self.qkv.heads(normed, groups, self.rules, rotary.cos, rotary.sin, attention.slots(layer))
        attended = attention.attend(layer, heads[:, :query], heads[:, query:]).flatten(1)
        if hidden is None or self._tp.size > 1:
            return self._tp.all_reduce(self.output(attended, groups))
        added = self.output.add_to(hidden, attended, groups)
        return added if isinstance(added, Stream) else Done(added)


def _rows(heads: range, head_dim: int) -> range:
    """Rows of these heads in a projection, which has head_dim for each."""
    return range(heads.start * head_dim, heads.stop * head_dim)
