"""The folder of recordings: a ring of the newest segments, and the files that were written of it.

DIR/ring-NAME/     header, 00000007.1.snapshot, 00000007.2.calls, …  of the server that runs, or of one that was killed
DIR/*.recording    incidents: what the ring had when something happened
"""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.core.types.errors import ConfigError
from headrace.scheduler.recording.file import SUFFIX, Header, encode_header

MAX_INCIDENTS = 16
MAX_RING_BYTES = 1 << 30
_HEADER, _LOCK = "header", "lock"
_SNAPSHOT, _CALLS = ".1.snapshot", ".2.calls"


class RecordingStore:
    """The files of one server in a folder. All but opening is done by a forked child; errors are OSErrors."""

    def __init__(self, folder: Path, name: str) -> None:
        """name: of the server among those that record in this folder. Raises ConfigError for a folder that cannot be
        written, or in which a server of this name records."""
        self._folder = folder
        self._ring = folder / f"ring-{name}"
        try:
            self._ring.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._ring / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--record {folder}: it cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"--record {folder}: another server records there as {name}") from error
        self._lock = descriptor

    @property
    def left(self) -> bool:
        """The ring has segments: those of a server that was killed, before this one has written any."""
        return any(self._sections())

    def begin(self, header: Header) -> None:
        """Write what incident files of this run begin with."""
        self._write(self._ring / _HEADER, msgspec.msgpack.encode(header))

    def snapshot(self, number: int, section: bytes) -> int:
        """Write the beginning of a segment. Returns the bytes."""
        return self._write(self._ring / f"{number:08}{_SNAPSHOT}", section)

    def calls(self, number: int, section: bytes) -> int:
        """Write the calls of a segment. Returns the bytes."""
        return self._write(self._ring / f"{number:08}{_CALLS}", section)

    def prune(self, first: int) -> None:
        """Remove segments before this number, and the oldest ones of a ring that is too large."""
        room = MAX_RING_BYTES
        for section in sorted(self._sections(), reverse=True):
            room -= section.stat().st_size
            if _number(section) < first or room < 0:
                section.unlink()

    def clear(self) -> None:
        """Remove the ring: this run has ended as it was told to."""
        with suppress(OSError):
            for each in [*self._sections(), self._ring / _HEADER]:
                each.unlink(missing_ok=True)

    def header(self) -> Header | None:
        """What the ring begins with; None for that of another version."""
        try:
            return msgspec.msgpack.decode((self._ring / _HEADER).read_bytes(), type=Header)
        except (OSError, msgspec.DecodeError):
            return None

    def incident(self, name: str, header: Header, last: int, calls: bytes | None) -> int:
        """Write a file of what the ring has, up to the segment with the last number, whose calls so far are given.
        Returns its bytes. The oldest files go beyond MAX_INCIDENTS."""
        path = self._folder / name
        part = path.with_suffix(".part")
        try:
            with open(part, "wb", opener=_private) as file:
                size = file.write(encode_header(header))
                for section in sorted(self._sections()):
                    if _number(section) < last or section.name.endswith(_SNAPSHOT):
                        size += file.write(section.read_bytes())
                if calls is not None:
                    size += file.write(calls)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        found = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda each: each.stat().st_mtime)
        for each in found[:-MAX_INCIDENTS]:
            each.unlink(missing_ok=True)
        return size

    def close(self) -> None:
        """Let another server of this name record here."""
        os.close(self._lock)

    def _sections(self) -> Iterator[Path]:
        with suppress(FileNotFoundError):
            for each in os.scandir(self._ring):
                if each.name.endswith((_SNAPSHOT, _CALLS)) and stat.S_ISREG(each.stat(follow_symlinks=False).st_mode):
                    yield Path(each.path)

    def _write(self, path: Path, data: bytes) -> int:
        """A file that is whole, or is not there. The folder is made again if it was removed."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        try:
            with open(part, "wb", opener=_private) as file:
                file.write(data)
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)
        return len(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _number(section: Path) -> int:
    return int(section.name.partition(".")[0])
