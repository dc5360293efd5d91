"""Private folders: removed at the end, or by the next process if theirs was killed; never those of others."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core.runtime.private_folder import LOCK, PREFIX, private_folder, remove_abandoned

CHILD = """
from headrace.core.runtime.private_folder import private_folder
with private_folder() as folder:
    (folder / "content").mkdir()
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def other_process(temporary: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process with a private folder, and that folder."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def abandoned(folder: Path, mode: int = 0o700) -> Path:
    """Makes a folder as a killed process leaves it."""
    folder.mkdir()
    (folder / LOCK).touch()
    (folder / "content").mkdir()
    folder.chmod(mode)
    return folder


def test_a_folder_is_removed_once_its_process_was_killed_and_not_before(temporary: Path) -> None:
    with other_process(temporary) as (process, folder):
        remove_abandoned()
        assert (folder / "content").is_dir(), "its process lives"
        process.kill()
        process.wait()
        assert folder.is_dir()
        remove_abandoned()
        assert not folder.exists()


def test_the_own_folder_stays_until_its_end(temporary: Path) -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o077 == 0
        remove_abandoned()
        assert folder.is_dir()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["other-abcdefgh", f"{PREFIX}abcdefgh"])
def test_what_is_not_a_private_folder_stays(temporary: Path, name: str) -> None:
    """Other names, folders that others may write to, and those without a lock."""
    others = abandoned(temporary / name, 0o700 if name.startswith("other") else 0o770)
    unlocked = temporary / f"{PREFIX}unlocked"
    unlocked.mkdir(0o700)
    (temporary / f"{PREFIX}file").touch()
    remove_abandoned()
    assert (others / "content").is_dir()
    assert unlocked.is_dir()
    assert (temporary / f"{PREFIX}file").is_file()


def test_folders_of_other_users_stay(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = abandoned(temporary / f"{PREFIX}others")
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    remove_abandoned()
    assert (folder / "content").is_dir()


def test_no_symbolic_link_is_followed(temporary: Path) -> None:
    """Neither to a folder, nor from its lock or its content to what lies elsewhere."""
    elsewhere = abandoned(temporary / "elsewhere")
    (temporary / f"{PREFIX}link").symlink_to(elsewhere)
    locked = abandoned(temporary / f"{PREFIX}locked")
    (locked / LOCK).unlink()
    (locked / LOCK).symlink_to(elsewhere / LOCK)
    inside = abandoned(temporary / f"{PREFIX}inside")
    (inside / "further").symlink_to(elsewhere)
    remove_abandoned()
    assert (elsewhere / "content").is_dir()
    assert (elsewhere / LOCK).is_file()
    assert locked.is_dir(), "its lock is not its own"
    assert not inside.exists(), "what it contains is removed, not what that points to"


def test_a_pipe_as_a_lock_holds_nothing_up(temporary: Path) -> None:
    folder = abandoned(temporary / f"{PREFIX}pipe")
    (folder / LOCK).unlink()
    os.mkfifo(folder / LOCK)
    remove_abandoned()
    assert folder.is_dir()
