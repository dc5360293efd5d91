"""What a tier of KV pages has to do, and how pages in CPU or GPU memory are read and written."""

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.core.types.kv.kv_tiers import PageHeader

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
