"""What the transfer needs of a KV pool: pages that are read and written, at once or by copies that go on beside."""

from collections.abc import Iterable
from typing import ClassVar, NamedTuple, Protocol

from headrace.transfer.protocol.layout import WHOLE, Box, Bytes


class Handle(Protocol):
    """Completion of an asynchronous operation."""

    @property
    def done(self) -> bool:
        """Once True, always True."""
        ...


class Completed(NamedTuple):
    """Handle of an operation that was done when it was asked for."""

    done: bool = True
    lost: str = ""

    def wait(self) -> None:
        """Nothing is to be waited for."""


class PageSlice(NamedTuple):
    """Slots of one page, or of a state's slot, that are read or written together."""

    page: int
    first_slot: int
    slots: int
    box: Box = WHOLE


class ReadablePages(Protocol):
    """Pages of each tensor that a pool's geometry names: [layers, planes, kv_heads, page_size, slot_bytes]. The owner
    decides how its memory is laid out."""

    def view(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """Bytes of the slots, [layers, planes, kv_heads, count, slot_bytes] with the layers and heads of the box, in
        place and strided where the pool can be read so, else a copy."""
        ...

    def read(self, page: int, first_slot: int, count: int, box: Box = WHOLE) -> Bytes:
        """C-contiguous bytes of the slots, [layers, planes, kv_heads, count, slot_bytes] with the layers and heads of
        the box. Layers of a whole page with all heads may be a view, which is then read until the peer has acknowledged
        it; anything less is a copy."""
        ...


class PageStore(ReadablePages, Protocol):
    """A KV pool that pages are received into. Base class of all of them."""

    on_device: ClassVar[bool] = False
    """Whether it is in the memory of a GPU."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Copy data, of the same shape, into the slots. data may be read-only and strided; it is not kept. What is not
        in host memory may be written by flush() only."""
        ...

    def flush(self) -> Handle:
        """Returns the handle of all writes since the last flush: done when they are in the pool."""
        return Completed()


class SourcePages(ReadablePages, Protocol):
    """Pages in host memory that are sent."""

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        ...

    @property
    def rows(self) -> Bytes | None:
        """All pages as [pages, bytes of a page], in place; None where they do not lie so, such as those of several
        tensors."""
        ...


class PendingRead(Handle, Protocol):
    """Pages on their way to host memory, or there."""

    @property
    def pages(self) -> SourcePages:
        """The pieces that were asked for, once done."""
        ...


class ReadInPlace(NamedTuple):
    """PendingRead of a pool in host memory."""

    pages: SourcePages
    done: bool = True


class SourceStore(PageStore, Protocol):
    """A pool whose pages are sent."""

    def in_place(self) -> SourcePages:
        """The pool where it is. Of a GPU's there are addresses only, for what reads its memory by itself."""
        ...

    def begin_read(self, pieces: Iterable[PageSlice], held: int = 0) -> PendingRead | None:
        """Start bringing pieces of the pool to host memory; in a pool that is there, they stay where they are. They
        must not change until it is done, and what is read of them is let go of.

        held: bytes that earlier reads for the same peer still hold. None where there is no room for more of it now.
        """
        ...


class HostPool(PageStore, Protocol):
    """Base class of pools in host memory: a SourceStore whose pages are read where they are."""

    page_size: int
    """Slots of a page."""

    @property
    def rows(self) -> Bytes | None:
        """See SourcePages."""
        ...

    def in_place(self) -> SourcePages:
        """Itself."""
        return self

    def begin_read(self, pieces: Iterable[PageSlice], held: int = 0) -> ReadInPlace:
        """Done at once."""
        return ReadInPlace(self)
