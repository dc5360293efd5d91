"""Disk tier: KV pages in append-only segment files that describe themselves, so that they are found after a restart.

    put ──► current segment ──full──► sealed segments ──all pages dropped, or room is needed──► deleted
                                        ▲
    scan at start: headers only ────────┘

A page is never overwritten in place. Its space is free again when its whole segment is: segments are deleted, never
rewritten. When room is needed the segment with the fewest pages goes, and take_lost() tells which slots went with it.
An eighth of the records is spare, so that most of such a segment has been dropped by then.

Nothing is flushed to the device by this module: it is a cache, and what a crash of the machine leaves in half is found
by its checksum.
"""

import errno
import logging
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import xxhash

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.kv_tiers import PageHeader
from headrace.engine.kv.tiers.pages import Bytes, Failure, Parts, TierError, check_slot
from headrace.engine.kv.tiers.record import HEADER_BYTES, Origin, Record, pack_header, parse_header
from headrace.engine.kv.tiers.segments import Ignored, SegmentScan, TierDirectory

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 << 20
LEAST_SEGMENTS = 4  # a smaller tier has smaller segments
SPARE = 8  # one record of so many is not a slot
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FoundPage(NamedTuple):
    """A page that was on disk at the start."""

    slot: int
    header: PageHeader


class _Place(NamedTuple):
    """Where a page is, and what it is: every tier counts slots, segments and offsets from 0."""

    segment: int
    offset: int
    digest: bytes
    salt: bytes


class _Segment:
    """A file of the directory; it may hold no page that is of use."""

    def __init__(self, size: int) -> None:
        self.size = size  # in bytes; that of a full one while it is written
        self.slots: set[int] = set()


class DiskStore:
    """A TierStore in a directory of its own. One thread gets; others may put and drop meanwhile."""

    def __init__(self, root: str, origin: Origin, budget_bytes: int) -> None:
        """Create and lock the directory of this model and stage below root; nothing is read yet.

        budget_bytes: of all segments, foreign ones included. Raises ConfigError when the directory cannot be used or
        the budget holds no segment.
        """
        self._origin = origin.pack()
        self._record_bytes = HEADER_BYTES + origin.geometry.page_bytes
        per_segment = min(SEGMENT_BYTES, budget_bytes // LEAST_SEGMENTS) // self._record_bytes
        if not per_segment:
            least = LEAST_SEGMENTS * self._record_bytes / (1 << 30)
            raise ConfigError(f"--disk-gib is too small for pages of this size: write {least:.3g} or more per stage")
        self._segment_bytes = per_segment * self._record_bytes
        self._budget_bytes = budget_bytes
        records = budget_bytes // self._segment_bytes * per_segment
        self._slots = records - max(1, records // SPARE)
        self._directory = TierDirectory(root, f"{origin.fingerprint}-stage{origin.stage}-shard{origin.shard}")
        self._places: dict[int, _Place] = {}  # by slot
        self._segments: dict[int, _Segment] = {}  # by number, foreign and damaged ones included
        self._next = 0  # number of the next segment
        self._writing: int | None = None  # file descriptor of the newest segment
        self._end = 0  # of the newest segment, in bytes
        self._lost: list[int] = []
        self._ignored: Counter[Ignored] = Counter()
        # Anonymous memory, aligned to pages of the system: a record that is being loaded.
        self._staging: Bytes = np.frombuffer(mmap.mmap(-1, self._record_bytes), np.uint8)
        self._lock = threading.Lock()

    @property
    def slots(self) -> int:
        """See TierStore."""
        return self._slots

    @property
    def ignored(self) -> Mapping[Ignored, int]:
        """Pages and files that scan() did not use, by reason."""
        return self._ignored

    def scan(self) -> list[FoundPage]:
        """Read the headers of all segments. Call it before the first put(). Raises OSError when the directory cannot be
        listed.

        What is damaged, foreign or half-written is counted and left on disk, where it is the first to be deleted when
        room is needed. Pages that were dropped before the server ended may be among those found.
        """
        scan = SegmentScan(self._directory, self._origin, self._record_bytes - HEADER_BYTES)
        headers: dict[int, PageHeader] = {}
        with self._lock:
            for segment, size in self._directory.segments():
                self._next = segment + 1
                if size is None:
                    scan.ignored["unreadable"] += 1
                    continue
                self._segments[segment] = _Segment(size)
                for record in scan.records(segment):
                    if record.slot >= self._slots:
                        scan.ignored["slot"] += 1
                        continue
                    if self._forget(record.slot):
                        scan.ignored["replaced"] += 1
                    self._enter(record.slot, _place(record))
                    headers[record.slot] = record.page
            self._ignored = scan.ignored
        return [FoundPage(slot, header) for slot, header in sorted(headers.items())]

    def put(self, slot: int, page: Parts, header: PageHeader | None) -> int:
        """See TierStore. Raises TierError, IndexError for a slot outside the tier, ValueError without a header."""
        check_slot(slot, self._slots)
        if header is None:
            raise ValueError("a page on disk needs a header")
        with self._lock, _as_tier_errors():
            self._forget(slot)
            descriptor = self._writable()
            length = self._record_bytes - HEADER_BYTES
            record = Record(header, slot, self._next - 1, self._end, length, _checksum(page))
            try:
                head = memoryview(pack_header(self._origin, record))
                _write(descriptor, (head, *(part.data for part in page)), self._end)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(descriptor, self._end)  # the part that was written
                raise
            self._end += self._record_bytes
            self._enter(slot, _place(record))
        return self._record_bytes

    def get(self, slot: int) -> Bytes:
        """See TierStore. Raises TierError, IndexError for a slot outside the tier."""
        check_slot(slot, self._slots)
        with self._lock, _as_tier_errors():
            place = self._places.get(slot)
            if place is None:
                raise TierError("missing", f"slot {slot} of the disk tier holds nothing")
            return self._read(slot, place)

    def expect(self, slots: Sequence[int]) -> None:
        """See TierStore: nothing is to be prepared."""

    def drop(self, slot: int) -> None:
        """See TierStore. Raises IndexError for a slot outside the tier."""
        check_slot(slot, self._slots)
        with self._lock:
            place = self._places.get(slot)
            self._forget(slot)
            if place is not None and not self._segments[place.segment].slots and not self._is_open(place.segment):
                self._remove(place.segment)

    def take_lost(self) -> Sequence[int]:
        """See TierStore."""
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    def close(self) -> None:
        """Close the files and unlock the directory."""
        with self._lock:
            if self._writing is not None:
                os.close(self._writing)
                self._writing = None
            self._directory.close()

    def _read(self, slot: int, place: _Place) -> Bytes:
        """A slot's page, verified. Raises TierError, OSError."""
        descriptor = self._directory.open(place.segment)
        try:
            size = os.preadv(descriptor, [self._staging.data], place.offset)
        finally:
            os.close(descriptor)
        data = self._staging[HEADER_BYTES:]
        record = parse_header(self._staging[:HEADER_BYTES].tobytes(), self._origin)
        if (
            size < self._record_bytes
            or not isinstance(record, Record)
            or (record.slot, _place(record)) != (slot, place)
            or record.checksum != _checksum((data,))
        ):
            raise TierError(
                "checksum", f"the page in slot {slot} of the disk tier was changed on disk, or is another one"
            )
        return data

    def _writable(self) -> int:
        """Descriptor of a segment with room for one record; makes room, if need be. Raises OSError."""
        if self._writing is not None and self._end + self._record_bytes <= self._segment_bytes:
            return self._writing
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
            if not self._segments[self._next - 1].slots:
                self._remove(self._next - 1)
        self._make_room()
        self._writing = self._directory.create(self._next)
        self._segments[self._next] = _Segment(self._segment_bytes)
        self._next += 1
        self._end = 0
        return self._writing

    def _make_room(self) -> None:
        """Delete segments until a new one is within the budget. Raises OSError."""
        taken = sum(segment.size for segment in self._segments.values())
        while self._segments and taken + self._segment_bytes > self._budget_bytes:
            victim = min(self._segments, key=lambda number: (len(self._segments[number].slots), number))
            self._directory.remove(victim)
            removed = self._segments.pop(victim)
            taken -= removed.size
            for slot in removed.slots:
                del self._places[slot]
                self._lost.append(slot)

    def _is_open(self, segment: int) -> bool:
        return self._writing is not None and segment == self._next - 1

    def _enter(self, slot: int, place: _Place) -> None:
        self._places[slot] = place
        self._segments[place.segment].slots.add(slot)

    def _forget(self, slot: int) -> bool:
        """Returns whether the slot held a page."""
        place = self._places.pop(slot, None)
        if place is not None:
            self._segments[place.segment].slots.discard(slot)
        return place is not None

    def _remove(self, segment: int) -> None:
        """Delete a segment without pages. Where that fails it stays, and is tried again when room is needed."""
        try:
            self._directory.remove(segment)
        except OSError as error:
            log.debug("segment %d of the disk tier cannot be deleted: %s", segment, error)
        else:
            del self._segments[segment]


def _checksum(page: Parts) -> int:
    """XXH3 of a page's bytes, one part behind the other."""
    state = xxhash.xxh3_64()
    for part in page:
        state.update(part.data)
    return state.intdigest()


def _place(record: Record) -> _Place:
    return _Place(record.segment, record.offset, record.page.digest, record.page.salt)


@contextmanager
def _as_tier_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason: Failure = "full" if error.errno in _FULL else "io"
        raise TierError(reason, f"the disk tier: {error.strerror}") from error


def _write(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers. Raises OSError."""
    left = list(buffers)
    while left:
        written = os.pwritev(descriptor, left, offset)
        offset += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
