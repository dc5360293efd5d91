"""Multi-head latent attention (MLA, arXiv 2405.04434) of DeepSeek-V2 and -V3.

    hidden ─► q_a ─ norm ─ q_b ─► query per head: nope_dim ‖ rope_dim          without q_lora_rank: one product
           └► kv_a ─► latent ─ norm ─┐
                  └─► key of rope_dim, shared by all heads, rotated ─► slot of the pool: latent ‖ key
                                                   kv_b per head: [K ‖ V] of a latent

Rotation is of neighboring elements (2i, 2i + 1).
"""

from functools import partial

import torch
from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.attention.latent import LatentProjections
from headrace.engine.attention.paged import AttentionPass
from headrace.engine.collectives.operations import ALONE, Collectives, Pending
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.lora import Groups
from headrace.engine.model.arithmetic import Arithmetic, LatentRules, Rows, Weight
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.mla_spec import INNER_NORM_EPS, MlaSpec
from headrace.engine.model.weights import LayerReader


class HeadsApart:
    """LatentProjections as a product per head, on the CPU: a row has the same bits whatever the number of rows."""

    def __init__(self, weight: Tensor, mla: MlaSpec, read: LayerReader, arithmetic: Arithmetic, form: MlaForm) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank]. form: what is not used in it is not held."""
        self._mla = mla
        self._arithmetic = arithmetic
        keys = weight[:, : mla.nope_dim]
        self._values = [read.packed(head.contiguous()) for head in weight[:, mla.nope_dim :]]
        self._absorb: list[Weight] = []  # per head [kv_rank, nope_dim]
        self._keys: list[Weight] = []  # per head [nope_dim, kv_rank]
        if form != "expanded":
            self._absorb = [read.packed(head.T.contiguous()) for head in keys]
        if form != "absorbed":
            self._keys = [read.packed(head.contiguous()) for head in keys]

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(query, self._absorb)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(attended, self._values)

    def expand(self, rows: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """See LatentProjections."""
        mla, linear = self._mla, self._arithmetic.linear
        latents = rows[:, : mla.kv_rank].contiguous()
        keys, values = (rows.new_empty(len(heads), len(rows), width) for width in (mla.query_dim, mla.value_dim))
        keys[..., mla.nope_dim :] = rows[:, mla.kv_rank :]
        for at, head in enumerate(heads):
            keys[at, :, : mla.nope_dim] = linear(latents, self._keys[head])
            values[at] = linear(latents, self._values[head])
        return keys.transpose(0, 1), values.transpose(0, 1)

    def _per_head(self, rows: Tensor, weights: list[Weight]) -> Tensor:
        apart = rows.transpose(0, 1).contiguous()  # [heads, tokens, width]
        products = [self._arithmetic.linear(head, weight) for head, weight in zip(apart, weights, strict=True)]
        return torch.stack(products, dim=1)


class HeadsTogether:
    """LatentProjections as one product over heads, on a GPU.

    That of a slot gives keys with their rotated part and values of the same width, as flash kernels take them: its
    weights are wider by zeros, and by ones for what is only copied. Results are those of the weights alone, but for the
    order of sums.
    """

    def __init__(self, weight: Tensor, mla: MlaSpec) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank], on the device."""
        self._mla, width = mla, mla.wide_dim
        self._weight = weight.new_zeros(len(weight), 2 * width, mla.slot_dim)
        self._weight[:, : mla.nope_dim, : mla.kv_rank] = weight[:, : mla.nope_dim]
        self._weight[:, mla.nope_dim : mla.query_dim, mla.kv_rank :].diagonal(dim1=1, dim2=2).fill_(1)
        self._weight[:, width : width + mla.value_dim, : mla.kv_rank] = weight[:, mla.nope_dim :]

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        keys = self._weight[:, : self._mla.nope_dim, : self._mla.kv_rank].to(query.dtype)
        return torch.bmm(query.transpose(0, 1), keys).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        first = self._mla.wide_dim
        values = self._weight[:, first : first + self._mla.value_dim, : self._mla.kv_rank].to(attended.dtype)
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def expand(self, rows: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """See LatentProjections."""
        some = self._weight[heads.start : heads.stop].to(rows.dtype)
        made = torch.matmul(rows, some.flatten(0, 1).T).view(len(rows), *some.shape[:2])
        return made[..., : self._mla.wide_dim], made[..., self._mla.wide_dim :]


class LatentAttentionBlock:
    """Attention block whose keys and values are made of one latent per token."""

    def __init__(
        self,
        spec: ModelSpec,
        mla: MlaSpec,
        read: LayerReader,
        arithmetic: Arithmetic,
        form: MlaForm,
        heads: range | None = None,
        tp: Collectives = ALONE,
    ) -> None:
        """Read the weights.

        form: that attention will ask for. heads: those of this rank, by default all; the ranks of tp have the others,
        and each has the whole latents in its pool. Raises ConfigError for a missing or misshapen tensor.
        """
        heads = heads or range(spec.heads)
        self._query_dim = mla.query_dim
        self._rope_dim = mla.rope_dim
        self._arithmetic = arithmetic
        self._tp = tp
        matrix = partial(read.matrix, rounded=True)
        of_heads = range(heads.start * mla.query_dim, heads.stop * mla.query_dim)
        queries = {"self_attn.q_b_proj" if mla.query_rank else "self_attn.q_proj": spec.heads * mla.query_dim}
        rows = dict.fromkeys(queries, of_heads)
        latents = {"self_attn.kv_a_proj_with_mqa": mla.slot_dim}
        self._query_b = query_norm = None
        if mla.query_rank:
            latents = {"self_attn.q_a_proj": mla.query_rank, **latents}
            query_norm = read.vector({"self_attn.q_a_layernorm": mla.query_rank})
            self._query_b = matrix(queries, mla.query_rank, rows=rows)
            self._first = matrix(latents, spec.hidden_size)  # [query_rank ‖ slot_dim, hidden]
        else:
            self._first = matrix({**queries, **latents}, spec.hidden_size, rows=rows)
        self._first_bias = read.vector(latents, "bias") if spec.output_bias else None
        if self._first_bias is not None and not mla.query_rank:  # queries have none
            self._first_bias = torch.cat((self._first_bias.new_zeros(len(of_heads)), self._first_bias))
        latent_norm = read.vector({"self_attn.kv_a_layernorm": mla.kv_rank})
        self._rules = LatentRules(query_norm, latent_norm, mla.rope_dim, INNER_NORM_EPS)
        self.projections = _projections(spec, mla, read, arithmetic, form, heads)
        """That attention asks for."""
        output, width = {"self_attn.o_proj": spec.hidden_size}, spec.heads * mla.value_dim
        values = range(heads.start * mla.value_dim, heads.stop * mla.value_dim)
        self._output = matrix(output, width, columns=values)
        with_bias = spec.output_bias and heads.start == 0  # added once
        self._output_bias = read.vector(output, "bias") if with_bias else None

    def post(
        self,
        layer: int,
        normed: Rows,
        rotary: Rotary,
        attention: AttentionPass,
        groups: Groups = (),
        hidden: Tensor | None = None,
    ) -> Pending:
        """See AttentionBlock. attention: to latents. No adapter changes it, and it adds to no residual stream."""
        linear, (cos, sin) = self._arithmetic.linear, rotary
        joined = linear(self._arithmetic.normed(normed), self._first, self._first_bias)
        query, latents = self._arithmetic.place_latents(joined, self._rules, cos, sin, attention.slots(layer))
        if self._query_b is not None:
            query = linear(query, self._query_b)
        heads = query.view(len(query), query.shape[1] // self._query_dim, self._query_dim)
        self._arithmetic.rotate_pairs(heads[..., -self._rope_dim :], cos, sin)
        attended = attention.attend(layer, heads, latents)
        return self._tp.all_reduce(linear(attended.flatten(1), self._output, self._output_bias))


def _projections(
    spec: ModelSpec, mla: MlaSpec, read: LayerReader, arithmetic: Arithmetic, form: MlaForm, heads: range
) -> LatentProjections:
    """kv_b_proj of these heads, in a form for the device."""
    per_head = mla.nope_dim + mla.value_dim
    weight = read.tensor("self_attn.kv_b_proj.weight", (spec.heads * per_head, mla.kv_rank))
    weight = weight.view(spec.heads, per_head, mla.kv_rank)[heads.start : heads.stop]
    if read.on_cpu:
        return HeadsApart(weight, mla, read, arithmetic, form)
    return HeadsTogether(read.placed(weight), mla)
