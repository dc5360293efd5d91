"""Pages of KV tiers: what a tier has to do, and how pages in CPU or GPU memory and in the pool are read and written."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.device_copies import DeviceCopies
from headrace.engine.kv.pool import KVPool

Bytes = NDArray[np.uint8]  # one-dimensional and contiguous
Failure = Literal["missing", "checksum", "full", "io"]
FAILURES: tuple[Failure, ...] = ("missing", "checksum", "full", "io")


class TierError(Exception):
    """A page could not be stored or loaded. The tier goes on working."""

    def __init__(self, reason: Failure, message: str) -> None:
        """reason: missing: the slot holds nothing; checksum: what it holds was changed; full: no space is left; io: the
        system refused."""
        super().__init__(message)
        self.reason = reason


class PageMemory(Protocol):
    """One page, in the memory of the CPU or of a GPU."""

    def view(self) -> Bytes:
        """The page's bytes in the memory of the CPU: in place where the page is there, else a copy."""
        ...

    def copy_to(self, target: Bytes) -> None:
        """Copy the page to memory of the CPU; complete on return."""
        ...

    def copy_from(self, source: Bytes) -> None:
        """Overwrite the page from memory of the CPU; complete on return."""
        ...


class HostPage:
    """A page in the memory of the CPU."""

    def __init__(self, row: Bytes) -> None:
        """row: all bytes of the page."""
        self._row = row

    def view(self) -> Bytes:
        """See PageMemory."""
        return self._row

    def copy_to(self, target: Bytes) -> None:
        """See PageMemory. Other threads run meanwhile: numpy releases the interpreter's lock."""
        np.copyto(target, self._row)

    def copy_from(self, source: Bytes) -> None:
        """See PageMemory."""
        np.copyto(self._row, source)


class TierStore(Protocol):
    """Slots that hold one page each. Slots are numbered from 0 by the scheduler."""

    @property
    def slots(self) -> int:
        """Number of slots."""
        ...

    def put(self, slot: int, page: PageMemory, header: PageHeader | None) -> int:
        """Store a page; what the slot held is gone. header: needed by the disk tier. Returns the bytes written.

        Raises TierError, after which the slot holds nothing.
        """
        ...

    def get(self, slot: int, page: PageMemory) -> None:
        """Verify a slot's page and copy it to a page. Raises TierError, and then the page is as it was."""
        ...

    def drop(self, slot: int) -> None:
        """Forget what the slot holds, if anything."""
        ...

    def take_lost(self) -> Sequence[int]:
        """Slots that the store had to empty to make room, since the last call."""
        ...

    def close(self) -> None:
        """Free memory and close files."""
        ...


def check_slot(slot: int, slots: int) -> None:
    """Raises IndexError for a slot outside the tier."""
    if not 0 <= slot < slots:
        raise IndexError(f"slot {slot} is outside the tier of {slots}")


class DevicePage:
    """A page on a GPU. Copies use a CUDA stream of their own."""

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
        """pool: of the thread's stage."""
        paged = [each.name for each in pool.geometry.tensors if not each.per_request]
        self._tensors = [pool.tensors[name].view(pool.pages, -1).view(torch.uint8) for name in paged]
        device = pool.tensor.device
        self._copies = DeviceCopies(device) if device.type == "cuda" else None
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
