"""What a backend that writes into the peer's pool has to have, on either side.

    sending stage:    Transport.open ─► RemotePages.write … flush ─► RemoteWrite done ─► header (written) ─► Ack
    receiving stage:  memory in the hello, RegisteredPool.grant in Attach; when a session has ended, revoke until it
    is True

Each is used by one thread, the stage's I/O thread, and no call waits for the other side.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.types.backends import NixlAccess, PoolMemory
from headrace.core.types.geometry import Geometry
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes, SourceStore


class Handle(Protocol):
    """Tells whether something that was begun is over."""

    @property
    def done(self) -> bool: ...


class RemoteWrite(Handle, Protocol):
    """Writes that were begun together. lost: why they will not be done while the session lasts, though some of their
    bytes may still be on the way; "" unless that is so. Once the RemotePages are closed they are done in any case."""

    @property
    def lost(self) -> str: ...


class RemotePages(Protocol):
    """The pool of one stage of a peer, as a sending stage writes into it; backends inherit from it."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """As PageStore.write. data stays as it is until what flush() returns is done. Raises IndexError for a page or
        slots that the pool has not."""
        ...

    def write_pages(self, pages: Sequence[int], store: SourceStore, own: Sequence[int]) -> None:
        """RemoteWrite these pages of our pool, whole, to those of a pool of the same geometry."""
        slots = store.page_size
        for page, source in zip(pages, own, strict=True):
            self.write(page, 0, slots, store.view(source, 0, slots))

    def flush(self) -> RemoteWrite:
        """Done when the bytes of all writes since the last flush are in the peer's pages."""
        ...

    def close(self) -> None:
        """Afterwards no write is begun, none is under way that reads our memory, and the peer can find out that none
        will be."""
        ...


class Transport(Protocol):
    """A way into the pools of peers."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> RemotePages:
        """stage: our own rank. geometry and memory: of the peer's pool. access: what the peer granted when it attached.
        Raises OSError or ValueError when the pool cannot be reached or is not what the peer says."""
        ...


class RegisteredPool(Protocol):
    """Our own pool, as peers may write into it."""

    def grant(self, session: str) -> NixlAccess | None:
        """What the stages of a prefill server need to write through this session beside what the hello said; None where
        that is all. Raises OSError when it cannot be had."""
        ...

    def revoke(self, session: str, stage: int) -> bool:
        """End the right of the stage `stage` of a prefill server to write through a session that has ended. False as
        long as it may still write: a process that is stopped, or that has not noticed. True is for good."""
        ...
