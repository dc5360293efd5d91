"""Grouped-query attention (GQA, arXiv 2305.13245) of the Llama family, with query, key and value in one product."""

from torch import Tensor

from headrace.engine.attention.base import AttentionPass
from headrace.engine.layers.base import Rotary
from headrace.engine.model.arithmetic import Arithmetic
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.weights import LayerReader


class GroupedAttention:
    """Attention block whose query heads share KV heads in groups; optional biases and norms of query and key heads."""

    def __init__(self, spec: ModelSpec, read: LayerReader, arithmetic: Arithmetic) -> None:
        """Read the weights. Raises ConfigError for a missing or misshapen tensor."""
        query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        projections = {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        self._spec = spec
        self._arithmetic = arithmetic
        self._qkv = read.matrix(projections, spec.hidden_size)  # [(heads + 2 * kv_heads) * head_dim, hidden]
        self._qkv_bias = read.vector(projections, "bias") if spec.qkv_bias else None
        self._q_norm = read.vector({"self_attn.q_norm": spec.head_dim}) if spec.qk_norm else None
        self._k_norm = read.vector({"self_attn.k_norm": spec.head_dim}) if spec.qk_norm else None
        self._output = read.matrix({"self_attn.o_proj": spec.hidden_size}, query)  # [hidden, heads * head_dim]
        self._output_bias = read.vector({"self_attn.o_proj": spec.hidden_size}, "bias") if spec.output_bias else None

    def forward(self, layer: int, normed: Tensor, rotary: Rotary, attention: AttentionPass) -> Tensor:
        """See AttentionBlock."""
        spec = self._spec
        heads = self._arithmetic.linear(normed, self._qkv, self._qkv_bias).view(
            -1, spec.heads + 2 * spec.kv_heads, spec.head_dim
        )
        query, keys = heads[:, : spec.heads], heads[:, spec.heads : spec.heads + spec.kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            query.copy_(self._norm(query.flatten(0, 1), self._q_norm).view_as(query))
            keys.copy_(self._norm(keys.flatten(0, 1), self._k_norm).view_as(keys))
        self._arithmetic.rotate(heads[:, : spec.heads + spec.kv_heads], rotary.cos, rotary.sin)
        attended = attention.attend(layer, query, heads[:, spec.heads :])
        return self._arithmetic.linear(attended.flatten(1), self._output, self._output_bias)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._arithmetic.add_norm(rows, None, weight, self._spec.norm_eps)
