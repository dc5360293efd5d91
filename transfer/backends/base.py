"""Interfaces of a transfer backend that writes into the peer's KV pool, on the sending and the receiving side; and the
fake backend, which moves no KV.

    sending stage:    Transport.open ─► RemotePages.write … flush ─► RemoteWrite done ─► header (written) ─► Ack
    receiving stage:  memory in Hello, RegisteredPool.grant in Attach; after the session, revoke until it returns True

Each is used by one thread, the stage's I/O thread, and no call waits for the other side.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.types.kv.backends import NixlAccess, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed, Handle, SourcePages


class RemoteWrite(Handle, Protocol):
    """Writes that were started together; done at the latest when what close() of their RemotePages returns is."""

    @property
    def lost(self) -> str:
        """Why they cannot complete within this session, although some of their bytes may still be in flight; "" if
        they can."""
        ...


class RemotePages(Protocol):
    """KV pool of one stage of a peer, writable by a sending stage. Base class of the backends' own."""

    by_address: bool = False
    """Whether it takes data from where our pool is, in the memory of a GPU."""
    unchecked: bool = False
    """Whether chunks have no checksum, since our pool or the peer's is in the memory of a GPU."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Start copying data into slots, as PageStore.write; data must not change until the handle of the next flush()
        is done. Raises IndexError for a page or slots outside the pool."""
        ...

    def write_pages(self, pages: Sequence[int], store: SourcePages, own: Sequence[int]) -> None:
        """Start copying whole pages `own` of our pool to `pages` of a pool of the same geometry. Raises IndexError."""
        slots = store.page_size
        for page, source in zip(pages, own, strict=True):
            self.write(page, 0, slots, store.view(source, 0, slots))

    def flush(self) -> RemoteWrite:
        """Returns the handle of all writes since the last flush: done when their bytes are in the peer's pages."""
        ...

    def close(self) -> Handle:
        """End access: no write starts any more. Returns a handle that is to be asked until it is done: none reads our
        memory then, and the peer's revoke() can succeed."""
        ...


class Transport(Protocol):
    """Opens peers' pools for writing."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> RemotePages:
        """Open the pool of one stage of a peer.

        stage: our own number in Welcome. geometry, memory: of the peer's pool. access: what the peer granted when it
        attached.
        Raises OSError or ValueError if the pool cannot be reached or is not what the peer describes.
        """
        ...


class RegisteredPool(Protocol):
    """Our own pool, registered so that peers can write into it."""

    def grant(self, session: str) -> NixlAccess | None:
        """Allow the stages of a prefill server to write in this session. Returns what they need beside the hello, None
        if nothing. Raises OSError if it cannot be granted."""
        ...

    def revoke(self, session: str, stage: int) -> bool:
        """End the right of a prefill stage to write through an ended session. False while it may still write, such as a
        stopped process. Once True, always True."""
        ...


class FakePages(RemotePages):
    """RemotePages that are never written."""

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Does nothing."""

    def flush(self) -> Completed:
        """Done at once."""
        return Completed()

    def close(self) -> Completed:
        """Does nothing."""
        return Completed()


class FakeTransport:
    """A Transport to any pool that moves no KV, to measure the cost of everything else. The peer decodes from stale
    pages."""

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> FakePages:
        """Never fails."""
        return FakePages()
