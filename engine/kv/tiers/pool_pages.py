"""Pages of a stage's KV pool, as the copier reads and writes them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.engine.kv.device_copies import DeviceCopies
from headrace.engine.kv.pool import KVPool
from headrace.engine.kv.tiers.store import Bytes, HostPage, PageMemory


class DevicePage:
    """A page on a GPU. Copies use a CUDA stream of their own and wait for the plans queued before them."""

    def __init__(self, page: Tensor, copies: DeviceCopies) -> None:
        """page: all bytes of the page, uint8, one-dimensional. copies: of the calling thread."""
        self._page = page
        self._copies = copies

    def view(self) -> Bytes:
        """See PageMemory."""
        copied: Bytes = self._copies.to_host(self._page).numpy()
        return copied

    def copy_to(self, target: Bytes) -> None:
        """See PageMemory. Copied directly where target is pinned."""
        self._copies.copy_to_host(self._page, torch.from_numpy(target))

    def copy_from(self, source: Bytes) -> None:
        """See PageMemory. Copied directly where source is pinned."""
        self._copies.to_device(self._page, torch.from_numpy(source))


class JoinedPage:
    """A page of several tensors, which lie apart: one after the other in what is stored."""

    def __init__(self, parts: Sequence[PageMemory], sizes: Sequence[int]) -> None:
        """sizes: bytes of each part."""
        self._parts = parts
        self._ends = list(accumulate(sizes, initial=0))

    def view(self) -> Bytes:
        """See PageMemory. Always a copy."""
        return np.concatenate([part.view() for part in self._parts])

    def copy_to(self, target: Bytes) -> None:
        """See PageMemory."""
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            part.copy_to(target[start:end])

    def copy_from(self, source: Bytes) -> None:
        """See PageMemory."""
        for part, (start, end) in zip(self._parts, pairwise(self._ends), strict=True):
            part.copy_from(source[start:end])


class PoolPages:
    """Makes PageMemory of a pool's pages, for one thread."""

    def __init__(self, pool: KVPool) -> None:
        """Call it before the first plan."""
        self._tensors = [tensor.view(pool.pages, -1).view(torch.uint8) for tensor in pool.tensors.values()]
        self._copies = pool.device_copies()
        self._pages = pool.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return sum(tensor.shape[1] for tensor in self._tensors)

    def page(self, page: int) -> PageMemory:
        """One page. Raises IndexError for a page outside the pool."""
        if not 0 <= page < self._pages:
            raise IndexError(f"page {page} is outside the pool of {self._pages}")
        parts = [self._part(tensor[page]) for tensor in self._tensors]
        return parts[0] if len(parts) == 1 else JoinedPage(parts, [tensor.shape[1] for tensor in self._tensors])

    def _part(self, row: Tensor) -> PageMemory:
        return HostPage(row.numpy()) if self._copies is None else DevicePage(row, self._copies)
