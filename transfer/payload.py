"""What the frames of a chunk hold: out of one pool, into another, or straight from pool to pool."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from core.geometry import Geometry
from transfer.backends.base import RemotePages
from transfer.checksum import Digest
from transfer.layout import Box, Bytes, Copy, PageStore, frame_shape, frames_of

Pages = Sequence[int]


def frames(store: PageStore, plan: list[Copy], pages: Pages, box: Box) -> list[Bytes]:
    """The payload of a plan, one frame for each source page, flat. box: the layers and heads that go."""
    return [store.read(pages[cut.page], cut.slot, cut.count, box).reshape(-1) for cut in frames_of(plan)]


def write_frames(
    store: PageStore, part: Geometry, plan: list[Copy], pages: Pages, payload: Sequence[memoryview]
) -> None:
    """Put frames (buffers) where a plan wants them. part: the source's geometry, cut to what comes."""
    cuts = frames_of(plan)
    blocks = [
        np.frombuffer(frame, np.uint8).reshape(frame_shape(part, cut.count))
        for frame, cut in zip(payload, cuts, strict=True)
    ]
    for copy in plan:
        offset = copy.source_slot - cuts[copy.source_page].slot
        data = blocks[copy.source_page][:, :, :, offset : offset + copy.count]
        store.write(pages[copy.page], copy.slot, copy.count, data, copy.destination)


def write_through(
    store: PageStore, remote: RemotePages, plan: list[Copy], pages: Pages, peer_pages: Pages, digest: Digest | None
) -> None:
    """Copy from pool to pool, without frames. digest: takes what they would hold, each while it is in the cache.
    Raises IndexError for a page that the peer's pool has not."""
    for cut, copies in _by_frame(plan):
        page = pages[cut]
        if digest is not None:
            first, last = copies[0], copies[-1]
            count = last.source_slot + last.count - first.source_slot
            digest.update(store.read(page, first.source_slot, count, first.source).data)
        for copy in copies:
            data = store.view(page, copy.source_slot, copy.count, copy.source)
            remote.write(peer_pages[copy.page], copy.slot, copy.count, data, copy.destination)


def in_place(store: PageStore, plan: list[Copy], pages: Pages) -> Iterator[Bytes]:
    """The frames that a plan's payload would have come in, read from where it lies."""
    for _, copies in _by_frame(plan):
        pieces = [store.read(pages[copy.page], copy.slot, copy.count, copy.destination) for copy in copies]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=3)


def _by_frame(plan: list[Copy]) -> Iterator[tuple[int, list[Copy]]]:
    for number, copies in groupby(plan, key=lambda copy: copy.source_page):
        yield number, list(copies)
