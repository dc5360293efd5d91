"""Host tier: KV pages in the memory of the CPU, each with a checksum."""

import mmap
from collections.abc import Sequence

import numpy as np
import xxhash

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.tiers.pages import Bytes, Parts, TierError, check_slot


class HostStore:
    """A TierStore in anonymous memory. The system provides the memory of a slot when it is first used.

    No huge pages: asking for them made the first use of a slot six times slower where memory is fragmented. Different
    slots may be used by different threads.
    """

    def __init__(self, slots: int, page_bytes: int) -> None:
        """Raises ConfigError when the memory cannot be had."""
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

    @property
    def slots(self) -> int:
        """See TierStore."""
        return self._slots

    def put(self, slot: int, page: Parts, header: PageHeader | None = None) -> int:
        """See TierStore. Raises IndexError for a slot outside the tier."""
        row = self._row(slot)
        self._checksums.pop(slot, None)  # should the copy fail, the slot holds nothing
        at = 0
        for part in page:  # other threads run meanwhile: numpy releases the interpreter's lock
            np.copyto(row[at : at + len(part)], part)
            at += len(part)
        self._checksums[slot] = xxhash.xxh3_64_intdigest(row.data)
        return len(row)

    def get(self, slot: int) -> Bytes:
        """See TierStore. The page is in place. Raises TierError, IndexError for a slot outside the tier."""
        row, checksum = self._row(slot), self._checksums.get(slot)
        if checksum is None:
            raise TierError("missing", f"slot {slot} of the host tier holds nothing")
        if xxhash.xxh3_64_intdigest(row.data) != checksum:
            raise TierError("checksum", f"the page in slot {slot} of the host tier was changed in memory")
        return row

    def expect(self, slots: Sequence[int]) -> None:
        """See TierStore: nothing is to be prepared."""

    def drop(self, slot: int) -> None:
        """See TierStore. Raises IndexError for a slot outside the tier. The memory is kept for the next page."""
        check_slot(slot, self._slots)
        self._checksums.pop(slot, None)

    def take_lost(self) -> Sequence[int]:
        """See TierStore: always empty."""
        return ()

    def close(self) -> None:
        """Forget all pages. The memory is freed with the store."""
        self._checksums.clear()

    def _row(self, slot: int) -> Bytes:
        check_slot(slot, self._slots)
        row: Bytes = self._rows[slot]
        return row
