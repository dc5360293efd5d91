"""Paged attention as the decoder calls it, and slot mapping: where in the pool keys and values of positions are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.geometry import ceil_div
from headrace.engine.kv.device_copies import place
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.arithmetic import KvSlots


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Embeddings of image tokens."""

    places: NDArray[np.int64]
    """Of these tokens, in a row or an image, ascending, on the host."""
    embeddings: Tensor
    """[tokens, hidden size]"""
    levels: tuple[Tensor, ...] = ()
    """What is added to their hidden states behind the first layers, as many [tokens, hidden size]."""


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """One row of a batch: positions [start, start + count) of a request."""

    start: int
    count: int
    pages: NDArray[np.int64]
    """Page ids covering [0, start + count), on the host."""
    slot: int = -1
    """Where the states of its request are in the pool; -1 where it keeps none."""
    resume: int = -1
    """Where those before the row are, if elsewhere."""
    checkpoint: int = -1
    """Where those behind the row are to be kept, too; -1 for nowhere."""
    adapter: str = ""
    """Fingerprint of the LoRA adapter that the row goes through; "" for none. Attention is the same for all."""
    rotary: NDArray[np.int64] | None = None
    """Rotary positions [axes, count], on the host; None where they are the row's positions."""
    image: ImageRows | None = None
    """What takes the place of embeddings of image tokens; None for a row without any."""


@runtime_checkable
class AttentionPass(Protocol):
    """Attention of one forward pass over a fixed set of spans; indices shared by all layers are prepared once.

    Keys and values are in the pool before any are read: written to slots(), or by attend() where there are none. Base
    class of the implementations.
    """

    def slots(self, layer: int) -> KvSlots | None:
        """Where keys and values are to be written before attend() is called; None where it writes them itself."""
        return None

    def attend(self, layer: int, query: Tensor, keys_values: Tensor) -> Tensor:
        """Causal attention over each request's positions.

        layer: counted from the stage's first. query: [tokens, heads, head_dim]. keys_values: [tokens, 2 * kv_heads,
        head_dim], keys before values. Rotary embedding is applied already; tokens are in the order of the spans.
        Returns [tokens, heads, head_dim].
        """
        ...


Attention = Callable[[Sequence[AttentionSpan]], AttentionPass]
"""Attention over one KV pool: prepares a forward pass over these rows, in batch order. Slots that no span covers never
influence a result, even if they hold NaN."""


class SlotWriter:
    """Writes the keys and values of a batch into the pages of its spans, one scatter per layer."""

    def __init__(self, pool: KVPool, spans: Sequence[AttentionSpan]) -> None:
        """Prepare the indices of the spans' positions."""
        self._pool = pool
        self._first = first_slots(pool, spans, prefixes=False)
        self._index: Tensor | None = None  # made by the first layer that writes

    def slots(self, layer: int) -> KvSlots:
        """See AttentionPass."""
        size = self._pool.geometry.page_size
        return KvSlots(self._pool.slots_from(layer), self._first, size, partial(self.write, layer))

    def write(self, layer: int, keys_values: Tensor) -> None:
        """Write a layer's keys and values. keys_values: [tokens, 2 * kv_heads, head_dim], keys before values, in the
        pool's dtype or a wider one."""
        if self._index is None:
            self._index = _with_heads(self._pool, self._first)
        rows = keys_values.reshape(-1, keys_values.shape[-1]).to(self._pool.slots.dtype)
        self._pool.slots_from(layer).index_copy_(0, self._index, rows)


def write_padded(pool: KVPool, layer: int, first: Tensor, keys_values: Tensor) -> None:
    """Write a layer's keys and values [tokens, 2 * kv_heads, head_dim] to the slots that begin at first int64 [tokens];
    those of tokens with a negative one nowhere. The first token has slots."""
    # The first token's are written once more in their place: shapes that follow from values make the host wait.
    absent = first < 0
    index = _with_heads(pool, torch.where(absent, first[:1], first))
    rows = torch.where(absent[:, None, None], keys_values[:1], keys_values).flatten(0, 1)
    pool.slots_from(layer).index_copy_(0, index, rows.to(pool.slots.dtype))


def slot_index(pool: KVPool, spans: Sequence[AttentionSpan], *, prefixes: bool) -> Tensor:
    """Rows of pool.slots that hold layer 0 of the spans' positions: int64 [positions * 2 * kv_heads], on the pool's
    device.

    prefixes: positions before each span are included. Spans in order; position by position, K heads before V heads. For
    other layers see KVPool.slots_from().
    """
    return _with_heads(pool, first_slots(pool, spans, prefixes=prefixes))


def first_slots(pool: KVPool, spans: Sequence[AttentionSpan], *, prefixes: bool) -> Tensor:
    """Rows of pool.slots that hold layer 0 of the first K head: int64 [positions], otherwise as slot_index()."""
    # Computed on the host: on a GPU each span would take half a dozen kernel launches.
    firsts = np.concatenate([_first_slots(pool, span, 0 if prefixes else span.start) for span in spans])
    return place(firsts, pool.tensor.device)


def held_pages(spans: Sequence[AttentionSpan], page_size: int) -> list[NDArray[np.int64]]:
    """The pages that hold positions of each span, without those that it has for later ones."""
    return [span.pages[: ceil_div(span.start + span.count, page_size)] for span in spans]


def page_table(spans: Sequence[AttentionSpan], page_size: int) -> NDArray[np.int32]:
    """The pages of each span (a block table): int32 [spans, most pages of one], filled up with 0, on the host."""
    pages = held_pages(spans, page_size)
    table = np.zeros((len(pages), max(map(len, pages))), np.int32)
    for row, held in zip(table, pages, strict=True):
        row[: len(held)] = held
    return table


def _with_heads(pool: KVPool, firsts: Tensor) -> Tensor:
    """Slots of all heads of the positions whose first K heads are in these."""
    size = pool.geometry.page_size
    heads = torch.arange(0, pool.blocks_per_layer * size, size, device=firsts.device)
    return (firsts[:, None] + heads).reshape(-1)


def _first_slots(pool: KVPool, span: AttentionSpan, first: int) -> NDArray[np.int64]:
    """Row of pool.slots with layer 0 of the first K head, for positions [first, end of the span): int64 [positions]."""
    pages, slots = np.divmod(np.arange(first, span.start + span.count), pool.geometry.page_size)
    return span.pages[pages] * (pool.blocks_per_page * pool.geometry.page_size) + slots
