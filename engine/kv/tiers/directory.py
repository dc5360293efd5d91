"""Directory of a disk tier: one per model and stage, readable by its owner only, used by one server at a time."""

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from headrace.core.types.errors import ConfigError

LOCK = "lock"
_SEGMENT = re.compile(r"segment-(\d{10})\.kv")


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
