"""Multi-head latent attention (MLA, arXiv 2405.04434) of DeepSeek-V2 and -V3.

    hidden ─► q_a ─ norm ─ q_b ─► query per head: nope_dim ‖ rope_dim          without q_lora_rank: one product
           └► kv_a ─► latent ─ norm ─┐
                  └─► key of rope_dim, shared by all heads, rotated ─► slot of the pool: latent ‖ key
                                                   kv_b per head: [K ‖ V] of a latent

Rotation is of neighbouring elements (2i, 2i + 1). The kernels rotate element i with i + half, so rows of the
projections that are rotated are read in that order, and results are brought back to pairs, the order of the pool.
"""

from typing import Protocol

import torch
from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.attention.latent import LatentPass, LatentRows
from headrace.engine.attention.paged import AttentionPass
from headrace.engine.collectives.operations import ALONE, Collectives, Pending
from headrace.engine.layers.base import Rotary
from headrace.engine.layers.lora import Groups
from headrace.engine.model.arithmetic import Arithmetic, Weight
from headrace.engine.model.config import ModelSpec
from headrace.engine.model.mla_spec import INNER_NORM_EPS, MlaSpec
from headrace.engine.model.weights import LayerReader


class LatentProjections(Protocol):
    """Per head K [nope_dim, kv_rank] and V [value_dim, kv_rank], in the model's dtype (never in 8 bits)."""

    def absorb(self, query: Tensor) -> Tensor:
        """query [tokens, heads, nope_dim] → [tokens, heads, kv_rank]: its product with a latent is that with the
        latent's key."""
        ...

    def values(self, attended: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, kv_rank] → those of their values [tokens, heads, value_dim]."""
        ...

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """latents [positions, kv_rank] → [positions, heads, nope_dim + value_dim] of these heads, keys before
        values."""
        ...


class HeadsApart:
    """LatentProjections as a product per head, on the CPU: a row has the same bits whatever the number of rows."""

    def __init__(self, weight: Tensor, nope_dim: int, read: LayerReader, arithmetic: Arithmetic, form: MlaForm) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank]. form: what is not used in it is not held."""
        self._arithmetic = arithmetic
        keys = weight[:, :nope_dim]
        self._values = [read.packed(head.contiguous(), int8=False) for head in weight[:, nope_dim:]]
        self._absorb: list[Weight] = []  # per head [kv_rank, nope_dim]
        self._keys: list[Weight] = []  # per head [nope_dim, kv_rank]
        if form != "expanded":
            self._absorb = [read.packed(head.T.contiguous(), int8=False) for head in keys]
        if form != "absorbed":
            self._keys = [read.packed(head.contiguous(), int8=False) for head in keys]

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(query, self._absorb)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        return self._per_head(attended, self._values)

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """See LatentProjections."""
        rows, linear = latents.contiguous(), self._arithmetic.linear
        made = [torch.cat((linear(rows, self._keys[head]), linear(rows, self._values[head])), -1) for head in heads]
        return torch.stack(made, dim=1)

    def _per_head(self, rows: Tensor, weights: list[Weight]) -> Tensor:
        apart = rows.transpose(0, 1).contiguous()  # [heads, tokens, width]
        products = [self._arithmetic.linear(head, weight) for head, weight in zip(apart, weights, strict=True)]
        return torch.stack(products, dim=1)


class HeadsTogether:
    """LatentProjections as one batched product over heads, on a GPU."""

    def __init__(self, weight: Tensor, nope_dim: int) -> None:
        """weight: [heads, nope_dim + value_dim, kv_rank], on the device."""
        self._weight = weight
        self._nope_dim = nope_dim

    def absorb(self, query: Tensor) -> Tensor:
        """See LatentProjections."""
        keys = self._weight[:, : self._nope_dim].to(query.dtype)
        return torch.bmm(query.transpose(0, 1), keys).transpose(0, 1)

    def values(self, attended: Tensor) -> Tensor:
        """See LatentProjections."""
        values = self._weight[:, self._nope_dim :].to(attended.dtype)
        return torch.bmm(attended.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: Tensor, heads: range) -> Tensor:
        """See LatentProjections."""
        some = self._weight[heads.start : heads.stop].to(latents.dtype)
        return torch.matmul(latents, some.flatten(0, 1).T).view(-1, *some.shape[:2])


class LatentAttentionBlock:
    """Attention block whose keys and values are made of one latent per token."""

    fixed = False  # what is computed beside attention depends on its form, and that on lengths

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
        self._mla = mla
        self._heads = len(heads)
        self._arithmetic = arithmetic
        self._tp = tp
        biased = spec.output_bias
        rows = query_rows(mla, heads)
        queries = (spec.heads * mla.query_dim, mla.query_rank or spec.hidden_size)
        latents = torch.cat((torch.arange(mla.kv_rank), mla.kv_rank + halves(mla.rope_dim)))
        first = [read.tensor("self_attn.kv_a_proj_with_mqa.weight", (mla.slot_dim, spec.hidden_size))[latents]]
        biases = [read.tensor("self_attn.kv_a_proj_with_mqa.bias", (mla.slot_dim,))[latents]] if biased else []
        self._query_b = self._query_norm = None
        if mla.query_rank:
            first.insert(0, read.tensor("self_attn.q_a_proj.weight", (mla.query_rank, spec.hidden_size)))
            if biased:
                biases.insert(0, read.tensor("self_attn.q_a_proj.bias", (mla.query_rank,)))
            self._query_norm = read.vector({"self_attn.q_a_layernorm": mla.query_rank})
            self._query_b = read.packed(read.tensor("self_attn.q_b_proj.weight", queries)[rows])
        else:
            first.insert(0, read.tensor("self_attn.q_proj.weight", queries)[rows])
            if biased:
                biases.insert(0, torch.zeros(len(rows), dtype=biases[0].dtype))
        self._first = read.packed(torch.cat(first))  # [query_rank or query rows ‖ slot_dim, hidden]
        self._first_bias = read.placed(torch.cat(biases)) if biased else None
        self._latent_norm = read.vector({"self_attn.kv_a_layernorm": mla.kv_rank})
        self._projections = _projections(spec, mla, read, arithmetic, form, heads)
        values = slice(heads.start * mla.value_dim, heads.stop * mla.value_dim)
        output = read.tensor("self_attn.o_proj.weight", (spec.hidden_size, spec.heads * mla.value_dim))
        self._output = read.packed(output[:, values].contiguous())
        with_bias = biased and heads.start == 0  # added once
        self._output_bias = read.vector({"self_attn.o_proj": spec.hidden_size}, "bias") if with_bias else None

    def post(
        self, layer: int, normed: Tensor, rotary: Rotary, attention: AttentionPass, groups: Groups = ()
    ) -> Pending:
        """See AttentionBlock. attention: a LatentPass. No adapter changes it."""
        assert isinstance(attention, LatentPass), "a model with latents has a pool of latents"
        nope, rotated, latents = self._project(normed, rotary)
        if len(attention.parts) == 1:
            attended = self._attend(layer, nope, rotated, latents, attention.parts[0])
        else:
            attended = nope.new_empty(len(nope), self._heads, self._mla.value_dim)
            for part in attention.parts:
                assert part.tokens is not None
                some = [rows.index_select(0, part.tokens) for rows in (nope, rotated, latents)]
                attended.index_copy_(0, part.tokens, self._attend(layer, some[0], some[1], some[2], part))
        output = self._arithmetic.linear(attended.flatten(1), self._output, self._output_bias)
        return self._tp.all_reduce(output)

    def _project(self, normed: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Query without rotation [tokens, heads, nope_dim], rotated query [tokens, heads, rope_dim] in halves, and
        latents [tokens, 1, slot_dim] as the pool holds them."""
        mla, heads = self._mla, self._heads
        joined = self._arithmetic.linear(normed, self._first, self._first_bias)
        width = joined.shape[1] - mla.slot_dim
        query, latent, key = joined[:, :width], joined[:, width : -mla.rope_dim], joined[:, -mla.rope_dim :]
        if self._query_b is not None and self._query_norm is not None:
            query = self._arithmetic.linear(self._norm(query, self._query_norm), self._query_b)
        nope = query[:, : heads * mla.nope_dim].view(-1, heads, mla.nope_dim)
        rotated = query[:, heads * mla.nope_dim :].view(-1, heads, mla.rope_dim)
        for rows in (rotated, key[:, None]):
            self._arithmetic.rotate(rows, rotary.cos, rotary.sin)
        return nope, rotated, torch.cat((self._norm(latent, self._latent_norm), pairs(key)), dim=1)[:, None]

    def _attend(self, layer: int, nope: Tensor, rotated: Tensor, latents: Tensor, part: LatentRows) -> Tensor:
        """[tokens, heads, value_dim] of these rows."""
        if part.absorbed is not None:
            query = torch.cat((self._projections.absorb(nope), pairs(rotated)), dim=-1)
            return self._projections.values(part.absorbed.attend(layer, query, latents))
        assert part.expanded is not None
        query = torch.cat((nope, pairs(rotated)), dim=-1)
        return part.expanded.attend(layer, query, latents, self._projections.expand)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return self._arithmetic.add_norm(rows, None, weight, INNER_NORM_EPS)


def _projections(
    spec: ModelSpec, mla: MlaSpec, read: LayerReader, arithmetic: Arithmetic, form: MlaForm, heads: range
) -> LatentProjections:
    """kv_b_proj of these heads, in a form for the device."""
    per_head = mla.nope_dim + mla.value_dim
    weight = read.tensor("self_attn.kv_b_proj.weight", (spec.heads * per_head, mla.kv_rank))
    weight = weight.view(spec.heads, per_head, mla.kv_rank)[heads.start : heads.stop]
    if read.on_cpu:
        return HeadsApart(weight, mla.nope_dim, read, arithmetic, form)
    return HeadsTogether(read.placed(weight), mla.nope_dim)


def query_rows(mla: MlaSpec, heads: range) -> Tensor:
    """Rows of the query projection of these heads: int64, all that are not rotated, then all that are, in halves."""
    starts = torch.arange(heads.start, heads.stop)[:, None] * mla.query_dim
    nope = starts + torch.arange(mla.nope_dim)
    rotated = starts + mla.nope_dim + halves(mla.rope_dim)
    return torch.cat((nope.reshape(-1), rotated.reshape(-1)))


def halves(width: int) -> Tensor:
    """Order that turns pairs into halves: elements 0, 2, 4 … 1, 3, 5 …"""
    return torch.cat((torch.arange(0, width, 2), torch.arange(1, width, 2)))


def pairs(rows: Tensor) -> Tensor:
    """The last axis from halves to pairs, a copy."""
    return rows.reshape(*rows.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
