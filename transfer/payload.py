"""What the frames of a chunk hold: out of one pool, into another, or straight from pool to pool."""

from collections.abc import Iterator, Sequence

import numpy as np

from transfer.backends.base import RemotePages
from transfer.checksum import Digest
from transfer.layout import Bytes, Copy, PageStore, carried

Pages = Sequence[int]


def frames(store: PageStore, plan: list[Copy], pages: Pages) -> list[Bytes]:
    """The payload of a plan, frame by frame, flat."""
    cuts = (frame for frame, _ in carried(plan))
    return [store.read(pages[cut.page], cut.slot, cut.count, cut.box).reshape(-1) for cut in cuts]


def write_frames(store: PageStore, plan: list[Copy], pages: Pages, payload: Sequence[memoryview]) -> None:
    """Put frames (buffers) where a plan wants them."""
    for (frame, copies), buffer in zip(carried(plan), payload, strict=True):
        block = np.frombuffer(buffer, np.uint8).reshape(frame.shape)
        for copy in copies:
            offset = copy.source_slot - frame.slot
            data = block[:, :, :, offset : offset + copy.count]
            store.write(pages[copy.page], copy.slot, copy.count, data, copy.destination)


def write_through(
    store: PageStore, remote: RemotePages, plan: list[Copy], pages: Pages, peer_pages: Pages, digest: Digest | None
) -> None:
    """Copy from pool to pool, without frames. digest: takes what they would hold, each while it is in the cache.
    Raises IndexError for a page that the peer's pool has not."""
    for frame, copies in carried(plan):
        page = pages[frame.page]
        if digest is not None:
            digest.update(store.read(page, frame.slot, frame.count, frame.box).data)
        for copy in copies:
            data = store.view(page, copy.source_slot, copy.count, copy.source)
            remote.write(peer_pages[copy.page], copy.slot, copy.count, data, copy.destination)


def in_place(store: PageStore, plan: list[Copy], pages: Pages) -> Iterator[Bytes]:
    """The frames that a plan's payload would have come in, read from where it lies."""
    for _, copies in carried(plan):
        pieces = [store.read(pages[copy.page], copy.slot, copy.count, copy.destination) for copy in copies]
        yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=3)
