"""Sends parts of chunks to peers: as payload frames, or by a write into the peer's pool that is then announced.

    pool ──read──► pages in host memory ──► frames ──────────────────────────────► connection
                                       └──► write into the peer's pool ──done──► announced

A read from a pool in host memory is done at once; one from a GPU's goes on beside, and the part waits for it.
"""

from headrace.core.runtime.codec import Codec
from headrace.core.stats import Counters
from headrace.core.types.kv.backends import ZMQ
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.data import payload
from headrace.transfer.data.outbound import Lane, Outbound, OutPart
from headrace.transfer.protocol import checksum
from headrace.transfer.protocol.layout import Bytes
from headrace.transfer.protocol.messages import StageMessage
from headrace.transfer.protocol.page_store import ReadInPlace, SourcePages, SourceStore
from headrace.transfer.sockets.connections import UNREAD
from headrace.transfer.sockets.listener import Listener


class PageOutOfRange(Exception):
    """A chunk names pages that the peer's pool does not have."""


class Transmitter:
    """Sends parts and messages to attached lanes. A lane whose connection takes no more is detached.

    Args:
        geometry: of our pool.
        store: our pool.
        outbound: has the lanes.
        listener: has their connections.
        counters: for sent bytes and chunks.
    """

    def __init__(
        self, geometry: Geometry, store: SourceStore, outbound: Outbound, listener: Listener, counters: Counters
    ) -> None:
        self._geometry = geometry
        self._store = store
        self._outbound = outbound
        self._listener = listener
        self._counters = counters
        self._codec: Codec[StageMessage] = Codec(StageMessage)

    def send(self, lane: Lane, part: OutPart, now: float) -> None:
        """Send a part that is in flight now: bring its pages to host memory, put them in frames or write them, and
        announce what is written. What has to wait is in lane.reading or lane.writing. Raises PageOutOfRange."""
        if part.write is not None:  # on an earlier connection
            self._await_write(lane, part, now)
            return
        if part.read is None:
            self._begin_read(lane, part)
        if part.read is None or not part.read.done:
            lane.reading.append(part)
        elif lane.remote is None:
            self._send_frames(lane, part, part.read.pages, now)
        else:
            try:
                self._write(lane, lane.remote, part, part.read.pages)
            except IndexError as error:
                raise PageOutOfRange(str(error)) from error
            self._await_write(lane, part, now)

    def say(self, lane: Lane, message: StageMessage, now: float) -> None:
        """Send a message, best effort: if the connection has closed, the peer asks again on the next one."""
        if not self._listener.put(lane.route or b"", self._codec.encode(message)):
            self._lose(lane, now)

    def _begin_read(self, lane: Lane, part: OutPart) -> None:
        """Start bringing a part's pages to host memory, if there is room; none where they are written from."""
        if lane.remote is not None and lane.remote.by_address:
            part.read = ReadInPlace(self._store.in_place())
            return
        order = part.chunk.order
        pieces = payload.pieces(self._passage(lane, part), payload.page_list(order.pages, order.slot))
        part.read = self._store.begin_read(pieces, held=lane.unacked_bytes - part.wire_bytes)
        if part.read is not None and not part.read.done:
            part.handles.append(part.read)

    def _passage(self, lane: Lane, part: OutPart) -> payload.Passage:
        order = part.chunk.order
        last = order.last is not None
        return payload.Passage(self._geometry, lane.destination, order.start, order.count, last)

    def _await_write(self, lane: Lane, part: OutPart, now: float) -> None:
        """Tell the peer about a part that is written, or wait for that."""
        if part.write is not None and part.write.done:
            self._transmit(lane, part, part.checksum, [], now)
        else:
            lane.writing.append(part)

    def _send_frames(self, lane: Lane, part: OutPart, pages: SourcePages, now: float) -> None:
        order = part.chunk.order
        frames = payload.frames(pages, self._passage(lane, part), payload.page_list(order.pages, order.slot))
        digest = checksum.of_frames([part.chunk.row, part.chunk.draft, *frames]) if lane.checksum else None
        self._transmit(lane, part, digest, frames, now)

    def _write(self, lane: Lane, remote: RemotePages, part: OutPart, pages: SourcePages) -> None:
        """Start writing a part into the peer's pages. Raises IndexError for pages that its pool does not have."""
        order = part.chunk.order
        own, theirs = payload.page_list(order.pages, order.slot), payload.page_list(order.dst_pages, order.dst_slot)
        digest = checksum.Digest(part.chunk.row + part.chunk.draft) if lane.checksum else None
        payload.write_through(pages, remote, self._passage(lane, part), own, theirs, digest)
        part.checksum = digest.intdigest() if digest is not None else None
        part.write = remote.flush()
        part.handles.append(part.write)
        self._counters.add("bytes_sent_total", part.payload_bytes, (lane.backend,))

    def _transmit(self, lane: Lane, part: OutPart, digest: int | None, frames: list[Bytes], now: float) -> None:
        """Put a part on the lane's connection: header, metadata row, draft frame, and payload frames unless it was
        written."""
        header = self._codec.encode(part.header(digest))
        beside = [frame for frame in (part.chunk.row, part.chunk.draft) if frame]
        handles = self._listener.put_tracked([lane.route or b"", header, *beside], frames)
        if handles is None:
            self._lose(lane, now)
            return
        part.handles.extend(handles)
        self._counters.add("chunks_sent_total")
        if frames:
            self._counters.add("bytes_sent_total", part.payload_bytes, (ZMQ,))

    def _lose(self, lane: Lane, now: float) -> None:
        """Close the connection of a lane, which is gone already or has left too much unread."""
        route = lane.route
        self._outbound.detach(lane)
        if route is not None:
            self._listener.drop(route, UNREAD, now)
