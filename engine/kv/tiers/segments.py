"""Segment files of a disk tier: their directory, and the scan at start, which finds pages by their headers."""

import fcntl
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from headrace.core.types.errors import ConfigError
from headrace.engine.kv.tiers.record import HEADER_BYTES, Foreign, Record, parse_header

LOCK = "lock"
_SEGMENT = re.compile(r"segment-(\d{10})\.kv")

Ignored = Literal["damaged", "version", "foreign", "short", "unreadable", "replaced", "slot"]
IGNORED: tuple[Ignored, ...] = ("damaged", "version", "foreign", "short", "unreadable", "replaced", "slot")
"""Why a page or a file on disk is not used: its header is not one or was changed; another version of the format;
another model, geometry or stage; written in part; the system does not read it; the slot was stored to later; the tier
has fewer slots now."""


class TierDirectory:
    """A locked directory with numbered segment files: the one that was locked, whatever is renamed or removed."""

    def __init__(self, root: str, name: str) -> None:
        """Create root/name, if need be, and lock it. Raises ConfigError when that cannot be done, or when another
        server uses it."""
        path = Path(root) / name
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            # All files are opened by this descriptor: a folder that is put in the place of this one is another's.
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"--disk-path {root}: {error.strerror} ({error.filename or path})") from error
        try:
            self._secure(root, path)
        except BaseException:
            os.close(self._folder)
            raise

    def _secure(self, root: str, path: Path) -> None:
        """Close the folder to others, and lock it. Raises ConfigError."""
        try:
            found = os.fstat(self._folder)
            if found.st_uid != os.geteuid():
                raise ConfigError(f"--disk-path {root}: {path} belongs to another user: write another directory")
            if stat.S_IMODE(found.st_mode) != 0o700:
                os.fchmod(self._folder, 0o700)
            self._lock = self._open(LOCK, os.O_RDONLY | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"--disk-path {root}: {error.strerror} ({error.filename or path})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--disk-path {root}: another server uses {path}: give each server a directory of its own"
            ) from error

    def segments(self) -> list[tuple[int, int | None]]:
        """Numbers and sizes in bytes of the segment files, in ascending order; None for what has the name of one and is
        no regular file. All else is left alone. Raises OSError."""
        found: list[tuple[int, int | None]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if match := _SEGMENT.fullmatch(entry.name):
                    regular = entry.is_file(follow_symlinks=False)
                    found.append((int(match[1]), entry.stat().st_size if regular else None))
        return sorted(found)

    def create(self, segment: int) -> int:
        """Create a segment. Returns its file descriptor, for writing. Raises OSError."""
        return self._open(_name(segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def open(self, segment: int) -> int:
        """Open a segment. Returns its file descriptor, for reading. Raises OSError."""
        return self._open(_name(segment), os.O_RDONLY)

    def remove(self, segment: int) -> None:
        """Delete a segment, if it is there. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(_name(segment), dir_fd=self._folder)

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)
        os.close(self._folder)

    def _open(self, name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW, 0o600, dir_fd=self._folder)


def _name(segment: int) -> str:
    return f"segment-{segment:010}.kv"


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
