"""Private temporary folders, and the removal of those whose process was killed.

    headrace-k3x9q2fd/         mode 0700, in the temporary folder of the user
        lock                   locked by flock() as long as the process lives, however it ends
        ...                    a converted tokenizer, while it is read

A folder without a lock file is left alone: it may be that of an older version, or be in the making.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

PREFIX = "headrace-"
LOCK = "lock"
_UNLOCKED = "lock.new"  # until it is locked
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A temporary folder, removed at the end. If the process is killed before, remove_abandoned() of another one does.
    Raises OSError if none can be made."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name, contextlib.ExitStack() as held:
        try:
            held.callback(os.close, _locked(name))
        except OSError as error:  # no descriptor, or no locks in this file system
            log.warning("%s cannot be locked: it stays if this process is killed: %s", name, error.strerror)
        yield Path(name)


def remove_abandoned() -> None:
    """Remove the private folders of this user whose processes have ended. Those of living processes and of other users
    stay, and no symbolic link is followed."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        parent = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, parent)
        for name in os.listdir(parent):
            if name.startswith(PREFIX):
                with contextlib.suppress(OSError):  # not a folder, not ours, not abandoned, or just gone
                    _remove_if_abandoned(parent, name)


def _locked(folder: str) -> int:
    """A descriptor of the folder's lock file, which has its name only once it is locked. Raises OSError."""
    path = os.path.join(folder, _UNLOCKED)
    descriptor = os.open(path, _FILE | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, os.path.join(folder, LOCK))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_abandoned(parent: int, name: str) -> None:
    """Raises OSError for a folder that is not to be removed."""
    with contextlib.ExitStack() as opened:
        folder = os.open(name, _FOLDER, dir_fd=parent)
        opened.callback(os.close, folder)
        state = os.fstat(folder)
        if state.st_uid != os.geteuid() or state.st_mode & _OTHERS:
            return
        lock = os.open(LOCK, _FILE, dir_fd=folder)
        opened.callback(os.close, lock)
        if not stat.S_ISREG(os.fstat(lock).st_mode):
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while its process lives
        if os.path.samestat(state, os.stat(name, dir_fd=parent, follow_symlinks=False)):
            shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
            log.info("removed %s, which a process that was killed had left", name)
