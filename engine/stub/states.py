"""What the stub model has in the place of keys and values: states in the slots of pages, and digests of what is read.

Every position has a state, a hash of all tokens up to it. It is written into the position's KV slots, XORed with
another constant for every layer, KV head, K and V. Where requests have states (stub:states=1), that of the last
position is in the request's slot, too, and what is read there has to be that of the pages. A digest is a hash of the
states of all positions up to one, as read from the pages: the sum over the query heads, each with a weight of its own,
of what they read from their KV heads.

All arithmetic is on integers modulo 2^64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.messages.orders import PlanRow
from headrace.engine.kv.pool import KVPool
from headrace.engine.model.sharding import Shard
from headrace.engine.runner import row_pages
from headrace.engine.stub.experts import mixed


class StubStates:
    """States in the pool of one shard of a stage.

    layers: of the stage. group: query heads of a KV head. positions: the model's.
    """

    def __init__(self, pool: KVPool, layers: range, shard: Shard, group: int, positions: int) -> None:
        self._pool = pool
        self._geometry = pool.geometry
        self._device = pool.tensor.device
        # [pages, layers, 2, kv_heads, page_size, words of 8 bytes in a slot]
        self._words = pool.tensor.view(torch.int64)
        # XORed into a state in the slots of a layer's K or V: int64 [layers, 2, kv_heads].
        masks = [
            self._numbers(range((head << 20) + 2 * layers.start, (head << 20) + 2 * layers.stop), 1)
            for head in shard.kv_heads
        ]
        self._masks = torch.stack(masks, 1).view(len(layers), 2, len(masks))
        # [slots, layers, kv_heads] and what is XORed into a state there; None where requests have none.
        self._slots: Tensor | None = None
        if (kept := pool.tensors.get("state")) is not None:
            self._slots = kept.view(torch.int64)[:, :, 0, :, 0, 0]
            self._slot_masks = self._masks[:, 0] * 3
        # Of the query heads of each KV head: int64 [kv_heads].
        self._head_weights = self._weights_of(shard, group)
        self._weights = self._numbers(range(positions), 2) | 1  # int64 [positions], odd

    def pages(self, row: PlanRow) -> Tensor:
        """The pages of a row: int64 [pages]. Raises ValueError if they do not cover its positions, IndexError for one
        outside the pool."""
        if (end := row.start + row.count) > len(self._weights):
            raise ValueError(f"request {row.request} has {end} positions, and the model {len(self._weights)}")
        return torch.from_numpy(row_pages(row, self._pool)).to(self._device)

    def compute(self, row: PlanRow, pages: Tensor, ids: NDArray[np.int32]) -> Tensor:
        """States int64 [count] of a row's positions with these tokens: the previous position's state plus token times
        position weight."""
        weights = self._weights[row.start : row.start + row.count]
        weighted = (torch.from_numpy(ids.astype(np.int64)).to(self._device) + 1) * weights
        previous: Tensor | int = 0
        if row.start:
            page, slot = divmod(row.start - 1, self._geometry.page_size)
            previous = self._words[pages[page], 0, 0, 0, slot, 0] ^ self._masks[0, 0, 0]
        return weighted.cumsum(0) + previous

    def write(self, row: PlanRow, pages: Tensor, states: Tensor) -> None:
        """Write the states of a row's positions, int64 [count], to its pages."""
        positions = torch.arange(row.start, row.start + row.count, device=self._device)
        page, slot = pages[positions // self._geometry.page_size], positions % self._geometry.page_size
        self._words[page, :, :, :, slot] = (states[:, None, None, None] ^ self._masks)[..., None]

    def gap(self, row: PlanRow, pages: Tensor) -> Tensor:
        """What a row's states and digests are off by, because the states of its request are not those of the position
        before it: int64 [1], 0 where they are."""
        none = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._slots is None or not row.start:
            return none
        page, slot = divmod(row.start - 1, self._geometry.page_size)
        expected = self._words[pages[page], 0, 0, 0, slot, 0] ^ self._masks[0, 0, 0]
        found = self._slots[row.slot if row.resume < 0 else row.resume] ^ self._slot_masks
        return none + ((found - expected) * (self._slot_masks | 1)).sum()

    def keep(self, row: PlanRow, state: Tensor) -> None:
        """Write the state behind a row's last position, int64 [1], to its request's slot and to its checkpoint's."""
        if self._slots is not None:
            for slot in (row.slot, row.checkpoint):
                if slot >= 0:
                    self._slots[slot] = state ^ self._slot_masks

    def digests(self, row: PlanRow, pages: Tensor) -> Tensor:
        """For each position of a row that samples, a hash of the states up to it as read from the pages by this shard's
        heads: int64 [count].

        Of every position one layer's K or V is read, in turn, of every KV head. Zeros for rows that are asked for
        nothing.
        """
        if row.sample is None and row.prompt_logprobs is None and not row.hidden:
            return torch.zeros(row.count, dtype=torch.int64, device=self._device)
        end, size = row.start + row.count, self._geometry.page_size
        positions = torch.arange(end, device=self._device)
        layer, kind = positions // 2 % self._geometry.layers, positions % 2
        words = self._words[pages[positions // size], layer, kind, :, positions % size, -1] ^ self._masks[layer, kind]
        read = ((words ^ (words >> 29)) * self._head_weights).sum(1)
        return (read * self._weights[:end]).cumsum(0)[row.start :]

    def merge(self, before: Tensor, digests: Tensor) -> Tensor:
        """Digests of the stage before and of this one, int64 [tokens] each: unchanged where they are equal, else a
        value that no stage computed."""
        return before + (digests - before) * self._numbers([0], 3)

    def _weights_of(self, shard: Shard, group: int) -> Tensor:
        """For each KV head of a shard the sum of its query heads' weights: int64 [kv_heads]. The weight of the first
        query head is 1, so that a model of one head has the digests of its states."""
        weights = self._numbers(shard.heads, 4) | 1
        if shard.first:
            weights[0] = 1
        totals = torch.zeros(len(shard.kv_heads), dtype=torch.int64, device=self._device)
        of = torch.tensor([head // group - shard.kv_heads.start for head in shard.heads], device=totals.device)
        return totals.index_add(0, of, weights)

    def _numbers(self, keys: Sequence[int], series: int) -> Tensor:
        """A pseudo-random 64-bit number for each key: int64 [keys]. series: keys of different series are
        independent."""
        numbers = mixed(np.asarray(keys, np.uint64) + np.uint64(series << 40))
        return torch.from_numpy(numbers.view(np.int64)).to(self._device)


def to_words(numbers: Tensor) -> Tensor:
    """[n, 16] elements that hold a byte each → int64 [n, 2]."""
    return numbers.to(torch.uint8).contiguous().view(torch.int64)


def to_bytes(words: Tensor) -> Tensor:
    """int64 [n, 2] → uint8 [n, 16]: the inverse of to_words."""
    return words.contiguous().view(torch.uint8)
