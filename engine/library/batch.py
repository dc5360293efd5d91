"""One forward pass of transformers' modules over rows of several requests, side by side in one sequence."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headrace.engine.attention.rings import RingPass
from headrace.engine.attention.slots import LayerSlot, Scores, SlotPass, plain_attention
from headrace.engine.attention.work import Ranges
from headrace.engine.library.cache import CacheOwner, RowsCache
from headrace.engine.library.hooks import Asked, Mask, positions_seen
from headrace.engine.library.modules import PackedExperts
from headrace.engine.library.states import Piece, RequestStates, StateStore, joined, of_request

MASK_ROWS = 256  # tokens whose masks are evaluated at a time


class CachedSlot(NamedTuple):
    """Where a layer's cache is in the pool."""

    slot: LayerSlot
    expanded: bool
    """The model makes keys and values of what it caches: it gets all positions, and attention what it made."""
    window: int = 0
    """They are in a ring, for so many positions."""


class Batch(CacheOwner):
    """A pass. It is Running and a CacheOwner."""

    def __init__(
        self,
        attention: SlotPass,
        rings: RingPass,
        slots: Mapping[int, CachedSlot],
        states: StateStore,
        positions: Tensor,
        layers: int,
        *,
        one_by_one: bool,
    ) -> None:
        """slots: by layer of the model. positions: int64 [tokens]. layers: of the model. one_by_one: modules with
        states cannot begin a chunk with one, so they get the tokens behind the first chunk singly."""
        self._attention = attention
        self._rings = rings
        self._slots = slots
        self._states = states
        self._layers = layers
        self._one_by_one = one_by_one
        spans = attention.spans
        edges = np.cumsum([0, *(span.count for span in spans)]).tolist()
        ends = np.cumsum([0, *(span.start + span.count for span in spans)]).tolist()
        self._rows = [slice(*edge) for edge in pairwise(edges)]
        self._positions_of = [slice(*edge) for edge in pairwise(ends)]
        self.offsets = spans[0].start
        if len(spans) > 1:
            self.offsets = positions - torch.arange(len(positions), device=positions.device)
        self._layer_of: dict[int, int] = {}
        self._kept: list[object] = []  # tensors and masks of this pass, so that their ids stay theirs
        self._ranges: dict[tuple[int, int], Ranges | None] = {}
        self._seen: dict[tuple[int, int], list[Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """See CacheOwner."""
        slot, expanded, window = self._slots[layer]
        if not window:
            self._attention.write(slot, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        if expanded:
            keys, values = (rows.transpose(0, 1)[None] for rows in self._attention.gather(slot, keys.dtype))
            return keys, values
        self._layer_of[id(keys)] = layer
        self._kept.append(keys)
        return keys, values

    def by_request(self, forward: Any, args: Any, named: Any) -> Any:
        """See Running."""
        tokens, parts = self._rows[-1].stop, []
        for piece in self._pieces:
            own_args, own_named = of_request((args, named), tokens, piece)
            parts.append(forward(*own_args, **own_named))
            piece.states.write()
        return joined(parts)

    @cached_property
    def _pieces(self) -> list[Piece]:
        """The tokens that modules with states get at once."""
        found = []
        for number, (rows, span) in enumerate(zip(self._rows, self._attention.spans, strict=True)):
            singly = self._one_by_one and span.start > 0
            for first in range(span.count) if singly else (0,):
                count = 1 if singly else span.count
                resume = -1 if first else span.resume
                own = replace(span, start=span.start + first, count=count, resume=resume)
                states = RequestStates(self._states, own)
                at = slice(rows.start + first, rows.start + first + count)
                seen = partial(self._seen_by, number, slice(first, first + count), own.start + count)
                found.append(Piece(at, states, RowsCache(states, self._layers), seen))
        return found

    def _seen_by(self, number: int, tokens: slice, positions: int, mask: Mask) -> Tensor:
        """bool [1, tokens, positions]: what some tokens of a row see of its first positions."""
        return self._seen_of(mask, 0)[number][tokens, :positions][None]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, asked: Asked) -> Tensor:
        """See Running."""
        scores = Scores(asked.scale or query.shape[3] ** -0.5, asked.softcap, asked.sinks)
        layer = self._layer_of.get(id(keys))
        if layer is not None and asked.indices is None:
            (slot, _, window), ranges = self._slots[layer], self._ranges_of(asked)
            queries, of_keys, of_values = (each[0].transpose(0, 1) for each in (query, keys, values))
            if not window:
                return self._attention.attend(slot, queries, scores, ranges)[None]
            if ranges is None:
                raise RuntimeError(f"layer {layer} attends to all positions; the probe has seen a window of {window}")
            return self._rings.attend(slot, queries, of_keys, of_values, scores, ranges, window)[None]
        if layer is not None:
            keys, values = (
                rows.transpose(0, 1)[None] for rows in self._attention.gather(self._slots[layer].slot, query.dtype)
            )
        parts = []
        for number, (rows, positions) in enumerate(zip(self._rows, self._positions_of, strict=True)):
            seen = self._seen_of(asked.mask, asked.window)[number]
            if asked.indices is not None:
                seen = seen & _selected(asked.indices[0, rows], seen.shape[1])
            queries, of_keys, of_values = (
                each[0, :, where].transpose(0, 1)
                for each, where in ((query, rows), (keys, positions), (values, positions))
            )
            parts.append(plain_attention(queries, of_keys, of_values, seen, scores))
        return torch.cat(parts)[None]

    def experts(self, module: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Running."""
        packed = module.packed
        assert isinstance(packed, PackedExperts)
        return packed.compute(x.reshape(-1, x.shape[-1]), chosen, weights).view(x.shape)

    def mask_tensor(self, mask: Mask) -> Mask:
        """See Running."""
        return mask

    def _ranges_of(self, asked: Asked) -> Ranges | None:
        """What a layer's mask and window let tokens attend to; None: all before them. Evaluated once for all layers
        that have the same mask. Raises ValueError where what a token sees is no range."""
        mask, window = asked.mask, asked.window
        key = id(mask), window
        if key not in self._ranges:
            plain = mask is None or (isinstance(mask, Mask) and mask.causal)
            self._ranges[key] = None if plain and not window else self._evaluated(mask, window)
            self._kept.append(mask)
        return self._ranges[key]

    def _evaluated(self, mask: object, window: int) -> Ranges:
        begins, ends = [], []
        for span in self._attention.spans:
            for first in range(span.start, span.start + span.count, MASK_ROWS):
                last = min(first + MASK_ROWS, span.start + span.count)
                seen = positions_seen(mask, window, np.arange(first, last), span.start + span.count)
                begin, end = seen.argmax(1), seen.shape[1] - seen[:, ::-1].argmax(1)
                if not (seen.sum(1) == end - begin).all() or not seen.any(1).all():
                    raise ValueError("a mask lets a token attend to positions that are not side by side")
                begins.append(begin)
                ends.append(end)
        return Ranges(*(np.concatenate(each).astype(np.int32) for each in (begins, ends)))

    def _seen_of(self, mask: object, window: int) -> list[Tensor]:
        """The same as bool [tokens, positions] of each row."""
        key = id(mask), window
        if key not in self._seen:
            spans = [(span.start, span.start + span.count) for span in self._attention.spans]
            self._seen[key] = [
                torch.from_numpy(positions_seen(mask, window, np.arange(start, end), end)) for start, end in spans
            ]
            self._kept.append(mask)
        return self._seen[key]


def _selected(indices: Tensor, positions: int) -> Tensor:
    """bool [tokens, positions] of the positions that a module has selected [tokens, k]; negative ones are none."""
    chosen = indices.long()
    selected = torch.zeros(len(chosen), positions + 1, dtype=torch.bool, device=chosen.device)
    return selected.scatter_(1, torch.where(chosen < 0, positions, chosen), True)[:, :positions]
