"""Attention of layers with a window: a request's last keys and values are a ring in its slot of the pool.

    place    0        64       128      192      256          window 200: ring_positions() are 320, five steps
             │ 320…383 │ 384… ● │ 128…191│ 192…255│ 256…319    position p is in place p mod 320; ● is written next

A chunk may have more tokens than a ring has places beside its window, so they are written and attended to a step of
them at a time. By kernels, to which a step of a ring is a page (work.py), else by plain torch.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import RING_STEP, ceil_div
from headrace.engine.attention.paged import AttentionSpan
from headrace.engine.attention.slots import LayerSlot, Scores, plain_attention
from headrace.engine.attention.work import MakeWork, PagedRows, Ranges, RowWork
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool


class RingStep(NamedTuple):
    """Tokens of a pass that are written, then attended to: of each row at most RING_STEP."""

    spans: list[AttentionSpan]
    """Their pages are steps of rings, see _pages()."""
    rows: NDArray[np.int64]
    """Of the pass's tokens."""
    slots: Tensor
    """By row."""
    places: Tensor


class RingPass:
    """Attention of one forward pass over rows, of layers with a window."""

    def __init__(self, pool: KVPool, make_work: MakeWork | None, spans: Sequence[AttentionSpan]) -> None:
        """make_work: None computes by torch."""
        self._pool = pool
        self._make_work = make_work
        self._spans = spans
        self._steps: dict[tuple[int, int], list[RingStep]] = {}
        self._work: dict[tuple[object, ...], list[RowWork]] = {}
        self._kept: list[Ranges] = []  # alive, so that their ids stay theirs

    def resume(self, tensors: Iterable[str]) -> None:
        """Before the first layer: rings of requests that go on behind a checkpoint become what they were there."""
        for span in self._spans:
            if span.resume >= 0:
                self._copy(tensors, span.resume, span.slot)

    def keep_checkpoints(self, tensors: Iterable[str]) -> None:
        """Behind the last layer."""
        for span in self._spans:
            if span.checkpoint >= 0:
                self._copy(tensors, span.slot, span.checkpoint)

    def attend(
        self, slot: LayerSlot, query: Tensor, keys: Tensor, values: Tensor, scores: Scores, ranges: Ranges, window: int
    ) -> Tensor:
        """Write keys and values of this pass's tokens [tokens, kv_heads, width], and attend to them and to what the
        ring has: query [tokens, heads, width] → [tokens, heads, width of values].

        ranges: what each token attends to. Raises ValueError for more than the window, and IndexError for a slot
        outside the pool.
        """
        if (ranges.ends - ranges.begins > window).any():
            raise ValueError(f"a token attends to more than the {window} positions of its layer's window")
        rings = tuple(self._pool.tensors[name] for name in (slot.keys, slot.values))
        own = rings[0][:, slot.layer, 0], rings[1][:, slot.layer, -1]  # [slots, kv_heads, places, width]
        steps = self._steps_of(rings[0])
        work = None if self._make_work is None else self._planned(slot, query.shape[1], scores, ranges, steps)
        parts = []
        for number, step in enumerate(steps):
            for ring, rows in zip(own, (keys, values), strict=True):
                ring[step.slots, :, step.places] = rows[step.rows].to(ring.dtype)
            queries = query[step.rows]
            if work is not None:
                parts.append(work[number].attend(slot.layer, queries.contiguous(), scores.sinks))
            else:
                parts.append(_plain(own, step, queries, scores, _of_rows(ranges, step)))
        if len(steps) == 1:
            return parts[0]
        order = np.argsort(np.concatenate([step.rows for step in steps]))
        return torch.cat(parts)[place(order, query.device)]

    def _copy(self, tensors: Iterable[str], source: int, to: int) -> None:
        for name in tensors:
            rings = self._pool.tensors[name]
            rings[to].copy_(rings[source])

    def _planned(
        self, slot: LayerSlot, heads: int, scores: Scores, ranges: Ranges, steps: Sequence[RingStep]
    ) -> list[RowWork]:
        assert self._make_work is not None
        key = slot.keys, slot.values, heads, scores.scale, scores.softcap, id(ranges)
        if key not in self._work:
            keys, values = self._pool.tensors[slot.keys], self._pool.tensors[slot.values]
            rows = PagedRows(_pages(keys, 0), _pages(values, values.shape[2] - 1), values.shape[-1])
            self._work[key] = [
                self._make_work(step.spans, rows, scores.scale, softcap=scores.softcap, ranges=_of_rows(ranges, step))
                for step in steps
            ]
            self._kept.append(ranges)
        return self._work[key]

    def _steps_of(self, rings: Tensor) -> list[RingStep]:
        """rings: [slots, layers, planes, kv_heads, places, width]"""
        slots, layers, planes, heads, places, _ = rings.shape
        key = places, layers * planes * heads
        if key not in self._steps:
            if outside := [span.slot for span in self._spans if not 0 <= span.slot < slots]:
                raise IndexError(f"slot {outside[0]} is outside the {slots} slots for windows")
            most = max(span.count for span in self._spans)
            self._steps[key] = [
                self._step(first, places, key[1] * places // RING_STEP) for first in range(0, most, RING_STEP)
            ]
        return self._steps[key]

    def _step(self, first: int, places: int, per_slot: int) -> RingStep:
        """The tokens from the first on of each row. per_slot: pages from one slot to the next, see _pages()."""
        spans, rows, slots, at = [], [], [], []
        for begin, span in zip(self._first_rows(), self._spans, strict=True):
            start, count = span.start + first, min(RING_STEP, span.count - first)
            if count <= 0:
                continue
            laps = np.arange(ceil_div(start + count, RING_STEP), dtype=np.int64) % (places // RING_STEP)
            spans.append(AttentionSpan(start, count, span.slot * per_slot + laps))
            rows.append(np.arange(begin + first, begin + first + count))
            slots.append(np.full(count, span.slot))
            at.append(np.arange(start, start + count) % places)
        device = self._pool.tensor.device
        return RingStep(spans, np.concatenate(rows), *(place(np.concatenate(each), device) for each in (slots, at)))

    def _first_rows(self) -> list[int]:
        edges = np.cumsum([0, *(span.count for span in self._spans)]).tolist()
        return [begin for begin, _ in pairwise(edges)]


def _pages(rings: Tensor, plane: int) -> Tensor:
    """Rings [slots, layers, planes, kv_heads, places, width] as pages of RING_STEP positions [pages, layers, kv_heads,
    RING_STEP, width], for reading: page n is n steps behind the first one, so a slot begins every so many pages as its
    tensor has steps, and of those in between only the first are steps of its first layer and head."""
    slots, layers, _, heads, places, width = rings.shape
    step = RING_STEP * width
    count = (slots - 1) * (rings.stride(0) // step) + places // RING_STEP
    strides = step, rings.stride(1), rings.stride(3), width, 1
    offset = rings.storage_offset() + plane * rings.stride(2)
    return rings.as_strided((count, layers, heads, RING_STEP, width), strides, offset)


def _of_rows(ranges: Ranges, step: RingStep) -> Ranges:
    return Ranges(ranges.begins[step.rows], ranges.ends[step.rows])


def _plain(rings: tuple[Tensor, Tensor], step: RingStep, query: Tensor, scores: Scores, ranges: Ranges) -> Tensor:
    """Attention of a step by torch, row by row. rings: [slots, kv_heads, places, width] each."""
    parts, first = [], 0
    for span in step.spans:
        rows = slice(first, first + span.count)
        first += span.count
        begins, ends = ranges.begins[rows], ranges.ends[rows]
        positions = np.arange(begins[0], ends[-1])
        slot, places = int(step.slots[rows.start]), place(positions % rings[0].shape[2], query.device)
        keys, values = (ring[slot][:, places].transpose(0, 1).to(query.dtype) for ring in rings)
        seen = place((positions >= begins[:, None]) & (positions < ends[:, None]), query.device)
        parts.append(plain_attention(query[rows], keys, values, seen, scores))
    return torch.cat(parts)
