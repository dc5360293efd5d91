"""Chunk payload: reads frames from a pool, writes frames into a pool, or copies from pool to pool."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import unpack
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.protocol.checksum import Digest
from headrace.transfer.protocol.layout import Bytes, Copy, carried, copies, whole_pages
from headrace.transfer.protocol.page_store import Handle, PageSlice, PageStore, ReadablePages, SourcePages

Pages = Sequence[int]


def page_list(pages: bytes, slot: int) -> Pages:
    """Packed page ids as a list; the slot of the request's states follows where there is one."""
    ids = unpack(pages)
    return ids if slot < 0 else [*ids, slot]


class Passage(NamedTuple):
    """Positions [start, start + tokens) that move from one rank to another."""

    source: Geometry
    destination: Geometry
    start: int
    tokens: int
    states: bool = False
    """The states of the request go with them."""


def pieces(passage: Passage, pages: Pages) -> Iterator[PageSlice]:
    """What the payload frames hold, frame by frame."""
    for frame, _ in carried(copies(*passage)):
        yield PageSlice(pages[frame.page], frame.slot, frame.count, frame.box)


def frames(source: ReadablePages, passage: Passage, pages: Pages) -> list[Bytes]:
    """Payload frames, each a flat array of bytes."""
    return [source.read(*piece).reshape(-1) for piece in pieces(passage, pages)]


def write_frames(store: PageStore, plan: list[Copy], pages: Pages, payload: Sequence[memoryview]) -> Handle:
    """Write received frames (buffers) into the pool as these copies say. Returns the handle of these writes."""
    for (frame, moves), buffer in zip(carried(plan), payload, strict=True):
        block = np.frombuffer(buffer, np.uint8).reshape(frame.shape)
        for copy in moves:
            offset = copy.source_slot - frame.slot
            data = block[:, :, :, offset : offset + copy.count]
            store.write(pages[copy.page], copy.slot, copy.count, data, copy.destination)
    return store.flush()


def write_through(
    source: SourcePages, remote: RemotePages, passage: Passage, pages: Pages, peer_pages: Pages, digest: Digest | None
) -> None:
    """Copy pages straight into the peer's pool, without frames. Raises IndexError for a page outside it.

    digest: updated with what the frames would hold, each while it is in the CPU cache.
    """
    whole = whole_pages(*passage[:4]) if digest is None else range(0)
    if whole:
        remote.write_pages(peer_pages[whole.start : whole.stop], source, pages[whole.start : whole.stop])
    for frame, moves in carried(copies(*passage)):
        if frame.page in whole:
            continue
        page = pages[frame.page]
        if digest is not None:
            digest.update(source.read(page, frame.slot, frame.count, frame.box).data)
        for copy in moves:
            data = source.view(page, copy.source_slot, copy.count, copy.source)
            remote.write(peer_pages[copy.page], copy.slot, copy.count, data, copy.destination)


def in_place(store: ReadablePages, plan: list[Copy], pages: Pages) -> Iterator[Bytes]:
    """The frames of a payload that was written in place, read back from the pool, for its checksum."""
    for _, moves in carried(plan):
        pieces = [store.read(pages[copy.page], copy.slot, copy.count, copy.destination) for copy in moves]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=3)
