"""Attention over a pool of latents (multi-head latent attention, arXiv 2405.04434), in two forms with one result.

    absorbed   queries are brought into the space of the latents: all heads attend to one row per position, whose first
               elements are also the value
    expanded   keys and values of all positions are made of their latents, then attention is as in any other model

A position costs less in expanded form, but all positions before a chunk have to be expanded for it. So long chunks are
cheaper expanded, short ones and single tokens absorbed. Results agree up to rounding only: where the bits of a prompt
must not depend on its chunks, one form takes all rows.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.attention.expanded import (
    DenseAttention,
    ExpandedPass,
    NativeDense,
    SdpaDense,
    masked_tiles,
)
from headrace.engine.attention.native import NativePass
from headrace.engine.attention.paged import Attention, AttentionPass, AttentionSpan, SlotWriter, slot_index
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.native.kernel_calls import Kernels


class LatentSdpaPass(AttentionPass):
    """An AttentionPass in absorbed form by scaled_dot_product_attention, row by row, for GPUs and CPUs without native
    kernels: latents are keys and values of all heads. See LatentRows.absorbed for shapes."""

    def __init__(self, mla: MlaSpec, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows."""
        self._mla = mla
        self._pool = pool
        self._spans = spans
        self._writer = SlotWriter(pool, spans)
        self._slots = [slot_index(pool, [span], prefixes=True) for span in spans]

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass and LatentRows.absorbed."""
        self._writer.write(layer, keys_values)
        parts = []
        first = 0
        for span, slots in zip(self._spans, self._slots, strict=True):
            rows = self._pool.slots_from(layer).index_select(0, slots)
            parts.append(self._row(query[first : first + span.count], rows.to(query.dtype)))
            first += span.count
        return torch.cat(parts)

    def _row(self, query: Tensor, rows: Tensor) -> Tensor:
        """query: [tokens, heads, slot_dim]; rows: latents of all positions [positions, slot_dim]."""
        values = rows[:, : self._mla.kv_rank]
        if len(query) == 1:  # heads side by side are rows of a product, so each latent is read once
            scores = (query[0] @ rows.T).float() * self._mla.scale
            return (scores.softmax(-1).to(query.dtype) @ values)[None]
        heads = query.shape[1]
        keys, shared = (part[:, None].expand(-1, heads, -1) for part in (rows, values))
        return masked_tiles(query, keys, shared, self._mla.scale)


class LatentRows(NamedTuple):
    """The rows of a pass that one of the forms takes."""

    tokens: Tensor | None
    """int64 [rows], of the pass's tokens; None: all of them."""
    absorbed: AttentionPass | None
    """query: [tokens, heads, slot_dim], absorbed; keys_values: latents [tokens, 1, slot_dim]. Returns [tokens, heads,
    kv_rank]."""
    expanded: ExpandedPass | None


class LatentPass(AttentionPass):
    """Attention of one forward pass, its rows divided by form."""

    def __init__(self, parts: Sequence[LatentRows]) -> None:
        """parts: together all rows, each row once."""
        self.parts = parts

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See LatentRows.absorbed. Raises ValueError for rows of the other form."""
        only = self.parts[0]
        if only.absorbed is None or only.tokens is not None:
            raise ValueError("these rows are attended in expanded form")
        return only.absorbed.attend(layer, query, keys_values)


class LatentAttention:
    """Attention over one pool of latents."""

    def __init__(self, mla: MlaSpec, pool: KVPool, form: MlaForm, absorbed: Attention, dense: DenseAttention) -> None:
        """form: not "auto". absorbed: over the latents as they are. dense: of expanded keys and values."""
        self._mla = mla
        self._pool = pool
        self._form = form
        self._absorbed = absorbed
        self._dense = dense

    def __call__(self, spans: Sequence[AttentionSpan]) -> LatentPass:
        """See Attention."""
        expanded = [self._form == "expanded" or (self._form == "length" and self._expands(span)) for span in spans]
        if len(set(expanded)) < 2:
            return LatentPass([self._part(spans, None, expanded=any(expanded))])
        ends = np.cumsum([span.count for span in spans])
        parts = []
        for form in (False, True):
            chosen = [number for number, each in enumerate(expanded) if each == form]
            rows = np.concatenate([np.arange(ends[number] - spans[number].count, ends[number]) for number in chosen])
            index = place(rows, self._pool.tensor.device)
            parts.append(self._part([spans[number] for number in chosen], index, expanded=form))
        return LatentPass(parts)

    def _part(self, spans: Sequence[AttentionSpan], index: Tensor | None, *, expanded: bool) -> LatentRows:
        if expanded:
            return LatentRows(index, None, ExpandedPass(self._mla, self._pool, spans, self._dense))
        return LatentRows(index, self._absorbed(spans), None)

    def _expands(self, span: AttentionSpan) -> bool:
        """Whether the expanded form takes fewer multiplications, per head and layer."""
        mla, count, positions = self._mla, span.count, span.start + span.count
        up = mla.kv_rank * (mla.nope_dim + mla.value_dim)
        expanded = positions * up + count * positions * (mla.query_dim + mla.value_dim)
        return expanded < count * up + count * positions * (mla.kv_rank + mla.slot_dim)


def resolve_form(form: MlaForm, device: str) -> MlaForm:
    """The form that --mla names; "auto" takes absorbed on the CPU, where results do not depend on chunks, and the
    cheaper one by length on a GPU."""
    if form != "auto":
        return form
    return "absorbed" if device.partition(":")[0] == "cpu" else "length"


def latent_attention(
    mla: MlaSpec, pool: KVPool, form: MlaForm, *, kernels: Kernels | None = None, absorbed: Attention | None = None
) -> LatentAttention:
    """Attention over a pool of latents on its device. kernels: the native ones, where they work. absorbed: of rows in
    absorbed form; None for torch."""
    form = resolve_form(form, pool.tensor.device.type)
    if kernels is not None:
        native = partial(NativePass, pool, kernels, scale=mla.scale, value_width=mla.kv_rank)
        return LatentAttention(mla, pool, form, native, NativeDense(kernels, mla.scale))
    dense: DenseAttention = SdpaDense(mla.scale)
    if pool.tensor.device.type != "cpu" and pool.tensor.dtype != torch.float32:
        from headrace.engine.attention.varlen import VarlenDense

        dense = VarlenDense(mla.scale)
    return LatentAttention(mla, pool, form, absorbed or partial(LatentSdpaPass, mla, pool), dense)
