"""Host tier: KV pages in the memory of the CPU, each with a checksum."""

import logging
import mmap
from collections.abc import Sequence

import numpy as np
import torch
import xxhash

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.tiers.pages import Bytes, HostPage, PageMemory, TierError, check_slot

log = logging.getLogger(__name__)


class HostStore:
    """A TierStore in anonymous memory. The system provides the memory of a slot when it is first used.

    No huge pages: asking for them made the first use of a slot six times slower where memory is fragmented. Different
    slots may be used by different threads.
    """

    def __init__(self, slots: int, page_bytes: int, *, pinned: bool = False) -> None:
        """pinned: lock the memory and register it with CUDA, so that GPUs copy from and to it directly. Raises
        ConfigError when the memory cannot be had."""
        self._slots = slots
        size = slots * page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"--host-pages {slots} takes {size / (1 << 30):.1f} GiB, which the system refuses ({error}): write less"
            ) from error
        self._rows: Bytes = np.frombuffer(self._memory, np.uint8).reshape(slots, page_bytes)
        self._checksums: dict[int, int] = {}  # of the slots that hold a page
        self._pinned = pinned and self._pin()

    @property
    def slots(self) -> int:
        """See TierStore."""
        return self._slots

    def put(self, slot: int, page: PageMemory, header: PageHeader | None = None) -> int:
        """See TierStore. Raises IndexError for a slot outside the tier."""
        row = self._row(slot)
        self._checksums.pop(slot, None)  # should the copy fail, the slot holds nothing
        page.copy_to(row)
        self._checksums[slot] = xxhash.xxh3_64_intdigest(row.data)
        return len(row)

    def get(self, slot: int, page: PageMemory) -> None:
        """See TierStore. Raises TierError, IndexError for a slot outside the tier."""
        page.copy_from(self.verified(slot).view())

    def verified(self, slot: int) -> PageMemory:
        """A slot's page in place, to be read until the slot is stored to or dropped. Raises TierError, IndexError."""
        row, checksum = self._row(slot), self._checksums.get(slot)
        if checksum is None:
            raise TierError("missing", f"slot {slot} of the host tier holds nothing")
        if xxhash.xxh3_64_intdigest(row.data) != checksum:
            raise TierError("checksum", f"the page in slot {slot} of the host tier was changed in memory")
        return HostPage(row)

    def drop(self, slot: int) -> None:
        """See TierStore. Raises IndexError for a slot outside the tier. The memory is kept for the next page."""
        check_slot(slot, self._slots)
        self._checksums.pop(slot, None)

    def take_lost(self) -> Sequence[int]:
        """See TierStore: always empty."""
        return ()

    def close(self) -> None:
        """Unregister the memory from CUDA. It is freed with the store."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._rows.ctypes.data)  # type: ignore[no-untyped-call]
            self._pinned = False
        self._checksums.clear()

    def _row(self, slot: int) -> Bytes:
        check_slot(slot, self._slots)
        row: Bytes = self._rows[slot]
        return row

    def _pin(self) -> bool:
        """Register the memory in place: torch's own pinned memory is rounded up to a power of two."""
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(cuda.cudaHostRegister(self._rows.ctypes.data, self._rows.nbytes, 0))
        if status:
            log.warning("the host tier's memory cannot be pinned (CUDA error %d): its copies are slower", status)
        return status == 0
