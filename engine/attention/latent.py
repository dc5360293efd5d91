"""Attention over a pool of latents (multi-head latent attention, arXiv 2405.04434), in two forms with one result.

    absorbed   queries are brought into the space of the latents: all heads attend to one row per position, whose first
               elements are also the value
    expanded   keys and values of all positions are made of their latents, then attention is as in any other model

A position costs less in expanded form, but all positions before a chunk have to be expanded for it. So long chunks are
cheaper expanded, short ones and single tokens absorbed. Results agree up to rounding only: where the bits of a prompt
must not depend on its chunks, one form takes all rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.config import MlaForm
from headrace.engine.attention.expanded import (
    DenseAttention,
    ExpandedRows,
    NativeDense,
    SdpaDense,
    masked_tiles,
)
from headrace.engine.attention.native import NativeWork, NativeWriter
from headrace.engine.attention.paged import AttentionPass, AttentionSpan, SlotWriter, slot_index
from headrace.engine.attention.work import PagedRows, PlanWork, RowWork
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots
from headrace.engine.model.mla_spec import MlaSpec
from headrace.engine.native.kernel_calls import Kernels


class LatentProjections(Protocol):
    """Of a layer, per head K [nope_dim, kv_rank] and V [value_dim, kv_rank], in the model's dtype (never in 8 bits)."""

    def absorb(self, query: Tensor) -> Tensor:
        """query [tokens, heads, nope_dim] → [tokens, heads, kv_rank]: its product with a latent is that with the
        latent's key."""
        ...

    def values(self, attended: Tensor) -> Tensor:
        """Weighted sums of latents [tokens, heads, kv_rank] → those of their values [tokens, heads, value_dim]."""
        ...

    def expand(self, rows: Tensor, heads: range) -> tuple[Tensor, Tensor]:
        """Keys and values of these heads. See Expand."""
        ...


class LatentSdpa(RowWork):
    """Attention in absorbed form by scaled_dot_product_attention, row by row, for GPUs and CPUs without native kernels:
    latents are keys and values of all heads. See LatentRows.absorbed for shapes."""

    def __init__(self, mla: MlaSpec, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of all rows."""
        self._mla = mla
        self._pool = pool
        self._spans = spans
        self._slots = [slot_index(pool, [span], prefixes=True) for span in spans]

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See RowWork and LatentRows.absorbed."""
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

    tokens: Tensor | slice
    """Of the pass's tokens: int64 [rows], or consecutive ones."""
    absorbed: RowWork | None
    """query: [tokens, heads, slot_dim], absorbed. Returns [tokens, heads, kv_rank]."""
    expanded: ExpandedRows | None


class LatentPass(AttentionPass):
    """Attention of one forward pass, its rows divided by form."""

    def __init__(
        self,
        mla: MlaSpec,
        parts: Sequence[LatentRows],
        writer: SlotWriter,
        projections: Sequence[LatentProjections],
    ) -> None:
        """parts: together all rows, each row once. writer: of the latents. projections: of each layer."""
        self._mla = mla
        self.parts = parts
        self._writer = writer
        self._projections = projections

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        return self._writer.slots(layer)

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """See AttentionPass. query: [tokens, heads, nope_dim + rope_dim]; keys_values: latents [tokens, 1, slot_dim],
        or none. Returns [tokens, heads, value_dim]."""
        if len(self.parts) == 1:
            return self._attend(layer, query, keys_values, self.parts[0])
        attended = query.new_empty(*query.shape[:2], self._mla.value_dim)
        for part in self.parts:
            if isinstance(part.tokens, slice):
                some = part.tokens
                attended[some] = self._attend(layer, query[some], keys_values[some], part)
            else:
                chosen = query.index_select(0, part.tokens)
                of_part = self._attend(layer, chosen, keys_values[:0, :0], part)
                attended.index_copy_(0, part.tokens, of_part)
        return attended

    def _attend(self, layer: int, query: Tensor, latents: Tensor, rows: LatentRows) -> Tensor:
        projections = self._projections[layer]
        if rows.expanded is not None:
            return rows.expanded.attend(layer, query, latents, projections.expand)
        assert rows.absorbed is not None
        nope, rotated = query[..., : self._mla.nope_dim], query[..., self._mla.nope_dim :]
        absorbed = torch.cat((projections.absorb(nope), rotated), dim=-1)
        return projections.values(rows.absorbed.attend(layer, absorbed))


class LatentAttention:
    """Attention over one pool of latents."""

    def __init__(
        self,
        mla: MlaSpec,
        pool: KVPool,
        form: MlaForm,
        projections: Sequence[LatentProjections],
        *,
        write: Callable[[Sequence[AttentionSpan]], SlotWriter],
        absorbed: PlanWork,
        dense: DenseAttention,
    ) -> None:
        """form: not "auto". projections: of each layer of the pool. write: of the latents of a pass. absorbed: over
        the latents as they are. dense: of expanded keys and values."""
        self._mla = mla
        self._pool = pool
        self._form = form
        self._projections = projections
        self._write = write
        self._absorbed = absorbed
        self._dense = dense

    def __call__(self, spans: Sequence[AttentionSpan]) -> LatentPass:
        """See Attention."""
        expanded = [self._form == "expanded" or (self._form == "length" and self._expands(span)) for span in spans]
        ends = np.cumsum([0, *(span.count for span in spans)])
        parts = []
        for form in sorted(set(expanded)):
            chosen = [number for number, each in enumerate(expanded) if each == form]
            rows = np.concatenate([np.arange(ends[number], ends[number + 1]) for number in chosen])
            parts.append(self._part([spans[number] for number in chosen], self._index(rows), expanded=form))
        return LatentPass(self._mla, parts, self._write(spans), self._projections)

    def _index(self, tokens: NDArray[np.int64]) -> Tensor | slice:
        first, count = int(tokens[0]), len(tokens)
        if tokens[-1] - first + 1 == count:  # they ascend
            return slice(first, first + count)
        return place(tokens, self._pool.tensor.device)

    def _part(self, spans: Sequence[AttentionSpan], tokens: Tensor | slice, *, expanded: bool) -> LatentRows:
        if expanded:
            return LatentRows(tokens, None, ExpandedRows(self._mla, self._pool, spans, self._dense))
        return LatentRows(tokens, self._absorbed(spans), None)

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
    mla: MlaSpec,
    pool: KVPool,
    form: MlaForm,
    projections: Sequence[LatentProjections],
    *,
    kernels: Kernels | None = None,
    absorbed: PlanWork | None = None,
) -> LatentAttention:
    """Attention over a pool of latents on its device. projections: of each layer of the pool. kernels: the native ones,
    where they work. absorbed: of rows in absorbed form; None for torch."""
    form = resolve_form(form, pool.tensor.device.type)
    if kernels is not None:
        rows = PagedRows.of_latents(pool, mla.kv_rank)
        return LatentAttention(
            mla,
            pool,
            form,
            projections,
            write=partial(NativeWriter, pool, kernels),
            absorbed=partial(NativeWork, kernels, rows=rows, scale=mla.scale),
            dense=NativeDense(kernels, mla.scale),
        )
    dense: DenseAttention = SdpaDense(mla.scale)
    if pool.tensor.device.type != "cpu" and pool.tensor.dtype != torch.float32:
        from headrace.engine.attention.varlen import VarlenDense

        dense = VarlenDense(mla.scale)
    return LatentAttention(
        mla,
        pool,
        form,
        projections,
        write=partial(SlotWriter, pool),
        absorbed=absorbed or partial(LatentSdpa, mla, pool),
        dense=dense,
    )
