"""Scan of a disk tier's segments at start: which pages they hold, by their headers."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from headrace.engine.kv.tiers.directory import TierDirectory
from headrace.engine.kv.tiers.record import HEADER_BYTES, Foreign, Record, parse_header

Ignored = Literal["damaged", "version", "foreign", "short", "unreadable", "replaced", "slot"]
IGNORED: tuple[Ignored, ...] = ("damaged", "version", "foreign", "short", "unreadable", "replaced", "slot")
"""Why a page or a file on disk is not used: its header is not one or was changed; another version of the format;
another model, geometry or stage; written in part; the system does not read it; the slot was stored to later; the tier
has fewer slots now."""


class SegmentScan:
    """Reads the headers of segments, and counts what is not used."""

    def __init__(self, directory: TierDirectory, origin: bytes, page_bytes: int) -> None:
        """origin: packed. page_bytes: of its pages."""
        self._directory = directory
        self._origin = origin
        self._page_bytes = page_bytes
        self.ignored: Counter[Ignored] = Counter()

    def records(self, segment: int) -> list[Record]:
        """The usable pages of a segment, in the order of writing. Their bytes are not read."""
        try:
            descriptor = self._directory.open(segment)
        except OSError:
            self.ignored["unreadable"] += 1
            return []
        records: list[Record] = []
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # headers only: no reading ahead
            records.extend(self._records(descriptor, segment))
        except OSError:
            self.ignored["unreadable"] += 1
        finally:
            os.close(descriptor)
        return records

    def _records(self, descriptor: int, segment: int) -> Iterator[Record]:
        size = os.fstat(descriptor).st_size
        at = 0
        while at < size:
            header = os.pread(descriptor, HEADER_BYTES, at)
            if len(header) < HEADER_BYTES:
                self.ignored["short"] += 1
                return
            length = self._page_bytes
            match parse_header(header, self._origin):
                case Record() as record if (record.segment, record.offset, record.length) != (segment, at, length):
                    self.ignored["damaged"] += 1
                case Record() as record:
                    if at + HEADER_BYTES + length > size:
                        self.ignored["short"] += 1
                    else:
                        yield record
                case Foreign(length=length):
                    self.ignored["foreign"] += 1
                case "version":
                    self.ignored["version"] += 1
                    return  # where its next header is cannot be told
                case "damaged":
                    self.ignored["damaged"] += 1
            at += HEADER_BYTES + length
