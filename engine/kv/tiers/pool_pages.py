"""Pages of a stage's KV pool, as the copier reads and writes them."""

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


class PoolPages:
    """Makes PageMemory of a pool's pages, for one thread."""

    def __init__(self, pool: KVPool) -> None:
        """Call it before the first plan."""
        self._rows = pool.rows
        self._bytes = pool.tensor.view(pool.pages, -1).view(torch.uint8)
        self._copies = pool.device_copies()
        self._pages = pool.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self._bytes.shape[1]

    def page(self, page: int) -> PageMemory:
        """One page. Raises IndexError for a page outside the pool."""
        if not 0 <= page < self._pages:
            raise IndexError(f"page {page} is outside the pool of {self._pages}")
        if self._copies is not None:
            return DevicePage(self._bytes[page], self._copies)
        assert self._rows is not None, "a pool without copies is on the CPU"
        return HostPage(self._rows[page])
