"""Directory of a disk tier: one per model and stage, readable by its owner only, used by one server at a time."""

import fcntl
import os
import re
import stat
from pathlib import Path

from headrace.core.types.errors import ConfigError

LOCK = "lock"
_SEGMENT = re.compile(r"segment-(\d{10})\.kv")


class TierDirectory:
    """A locked directory with numbered segment files."""

    def __init__(self, root: str, name: str) -> None:
        """Create root/name, if need be, and lock it. Raises ConfigError when that cannot be done, or when another
        server uses it."""
        self.path = Path(root) / name
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.path.stat()
            if owner.st_uid != os.geteuid():
                raise ConfigError(f"--disk-path {root}: {self.path} belongs to another user: write another directory")
            if stat.S_IMODE(owner.st_mode) != 0o700:
                self.path.chmod(0o700)
            self._lock = os.open(self.path / LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"--disk-path {root}: {error.strerror} ({error.filename or self.path})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--disk-path {root}: another server uses {self.path}: give each server a directory of its own"
            ) from error

    def segments(self) -> list[tuple[int, int | None]]:
        """Numbers and sizes in bytes of the segment files, in ascending order; None for what has the name of one and is
        no regular file. All else is left alone. Raises OSError."""
        found: list[tuple[int, int | None]] = []
        for entry in os.scandir(self.path):
            if match := _SEGMENT.fullmatch(entry.name):
                regular = entry.is_file(follow_symlinks=False)
                found.append((int(match[1]), entry.stat().st_size if regular else None))
        return sorted(found)

    def file(self, segment: int) -> Path:
        """Path of a segment."""
        return self.path / f"segment-{segment:010}.kv"

    def create(self, segment: int) -> int:
        """Create a segment. Returns its file descriptor, for writing. Raises OSError."""
        return os.open(self.file(segment), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)

    def open(self, segment: int) -> int:
        """Open a segment. Returns its file descriptor, for reading. Raises OSError."""
        return os.open(self.file(segment), os.O_RDONLY | os.O_NOFOLLOW)

    def remove(self, segment: int) -> None:
        """Delete a segment, if it is there. Raises OSError."""
        self.file(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)
