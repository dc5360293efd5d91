"""The disk tier: restarts, room, permissions, two servers, and a disk that fails."""

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.types.errors import ConfigError
from headrace.engine.kv.tiers.disk_store import SEGMENT_BYTES, DiskStore
from headrace.engine.kv.tiers.pages import TierError
from tests.engine.kv.tiers.pages import ORIGIN, RECORD, disk, get, header, page, put


def folder_of(root: Path) -> Path:
    [folder] = root.iterdir()
    return folder


def segments(root: Path) -> list[Path]:
    return sorted(folder_of(root).glob("segment-*.kv"))


def refused(store: DiskStore, slot: int) -> str:
    """Why the store does not load a slot."""
    with pytest.raises(TierError) as raised:
        get(store, slot)
    return raised.value.reason


def test_pages_are_found_after_a_restart(tmp_path: Path) -> None:
    store = disk(tmp_path)
    assert store.scan() == []
    for slot in range(12):
        put(store, slot)
    put(store, 3, seed=50)
    store.close()
    again = disk(tmp_path)
    found = again.scan()
    assert [(each.slot, each.header) for each in found] == [
        (slot, header(50 if slot == 3 else slot)) for slot in range(12)
    ]
    assert dict(again.ignored) == {"replaced": 1}
    assert all(np.array_equal(get(again, slot), page(50 if slot == 3 else slot)) for slot in range(12))
    put(again, 20)
    put(again, 0, seed=60)
    again.close()
    third = disk(tmp_path)
    assert {each.slot: each.header for each in third.scan()}[0] == header(60)
    assert np.array_equal(get(third, 20), page(20))
    third.close()


def test_a_page_that_was_dropped_may_come_back_and_is_whole(tmp_path: Path) -> None:
    """Drops are not written: what is found has the digest that it had."""
    store = disk(tmp_path)
    put(store, 0)
    put(store, 1)
    store.drop(1)
    store.close()
    again = disk(tmp_path)
    assert [each.slot for each in again.scan()] == [0, 1]
    assert np.array_equal(get(again, 1), page(1))
    again.close()


def test_a_segment_goes_when_its_last_page_does(tmp_path: Path) -> None:
    store = disk(tmp_path)  # eight records in each segment
    for slot in range(17):
        put(store, slot)
    assert len(segments(tmp_path)) == 3
    for slot in range(8, 16):
        store.drop(slot)
    assert [path.name[-4:-3] for path in segments(tmp_path)] == ["0", "2"]
    store.drop(16)
    assert len(segments(tmp_path)) == 2, "the one that is being written stays"
    for slot in range(16, 24):
        put(store, slot)
        store.drop(slot)
    put(store, 24)
    assert len(segments(tmp_path)) == 2, "and goes when it is full"
    assert np.array_equal(get(store, 0), page(0))
    store.close()


def test_the_segment_with_the_fewest_pages_makes_room(tmp_path: Path) -> None:
    store = disk(tmp_path)
    assert store.slots == 28
    for slot in range(28):
        put(store, slot)
    for slot in (0, 8, 9, 16):
        store.drop(slot)
    for slot in (0, 8, 9, 16):
        put(store, slot)
    assert store.take_lost() == []
    put(store, 0, seed=70)  # no room: of 32 records all are written
    assert sorted(store.take_lost()) == [10, 11, 12, 13, 14, 15], "those of the segment that had lost two"
    assert store.take_lost() == []
    assert refused(store, 10) == "missing"
    assert np.array_equal(get(store, 0), page(70))
    assert np.array_equal(get(store, 9), page(9))
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 32 * RECORD
    store.close()


def test_a_smaller_tier_keeps_what_has_a_slot_and_its_room(tmp_path: Path) -> None:
    store = disk(tmp_path, records=64)
    for slot in range(40):
        put(store, slot)
    store.close()
    smaller = disk(tmp_path, records=16)
    assert [each.slot for each in smaller.scan()] == list(range(14))
    assert smaller.ignored["slot"] == 26
    put(smaller, 0, seed=80)
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 16 * RECORD
    assert np.array_equal(get(smaller, 0), page(80))
    smaller.close()


def test_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--disk-gib is too small for pages of this size: write .* or more"):
        disk(tmp_path, records=3)
    store = DiskStore(str(tmp_path), ORIGIN, 8 * SEGMENT_BYTES)
    per_segment = SEGMENT_BYTES // RECORD
    assert store.slots == 8 * per_segment - 8 * per_segment // 8
    store.close()


def test_only_the_owner_reads_and_salts_are_hashed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = disk(tmp_path)
        put(store, 0)
    finally:
        os.umask(before)
    folder = folder_of(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    store.close()
    folder.chmod(0o755)
    disk(tmp_path).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700, "one that others could read is closed"


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    first = disk(tmp_path)
    with pytest.raises(ConfigError, match=r"another server uses .*: give each server a directory of its own"):
        disk(tmp_path)
    other = disk(tmp_path, origin=replace(ORIGIN, stage=2))
    other.close()
    first.close()
    disk(tmp_path).close()


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = f"import time; from tests.engine.kv.tiers.pages import disk; d = disk({str(tmp_path)!r}); print(1, flush=True); time.sleep(60)"  # noqa: E501
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigError, match="another server uses"):
            disk(tmp_path)
        process.kill()
        process.wait()
        disk(tmp_path).close()


def test_a_path_that_cannot_be_used_is_a_mistake_in_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match=f"--disk-path {file}: Not a directory"):
        disk(file)
    assert file.read_text() == ""


@pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.EIO, "io"), (errno.EROFS, "io")]
)
def test_a_write_that_fails_fails_that_page_alone(
    code: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = disk(tmp_path)
    put(store, 0)
    put(store, 1)

    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.pwrite(descriptor, bytes(buffers[0])[:100], offset)  # a part of it is written
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr("headrace.engine.kv.tiers.disk_store.os.pwritev", fails)
        for slot in (1, 2):
            with pytest.raises(TierError, match="the disk tier: ") as raised:
                put(store, slot, seed=90)
            assert raised.value.reason == reason
    assert [path.stat().st_size for path in segments(tmp_path)] == [2 * RECORD], "no part of it stays"
    assert refused(store, 1) == "missing", "neither the old page nor the new one"
    assert np.array_equal(get(store, 0), page(0))
    put(store, 2)
    assert np.array_equal(get(store, 2), page(2))
    store.close()
    again = disk(tmp_path)
    assert [each.slot for each in again.scan()] == [0, 1, 2], "slot 1 as it was before"
    assert np.array_equal(get(again, 1), page(1))
    again.close()


def test_writes_in_parts_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev

    def slowly(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return whole(descriptor, [buffers[0][:100]], offset)

    monkeypatch.setattr("headrace.engine.kv.tiers.disk_store.os.pwritev", slowly)
    store = disk(tmp_path)
    put(store, 0)
    put(store, 1)
    assert np.array_equal(get(store, 0), page(0))
    assert np.array_equal(get(store, 1), page(1))
    store.close()


FULL_DISK = """
import subprocess, sys
from tests.engine.kv.tiers.pages import disk, get, page, put
from headrace.engine.kv.tiers.pages import TierError

def attempt(slot):
    try: put(store, slot)
    except TierError as error: return error.reason
    return "stored"

folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=True)
store = disk(folder, records=256)
results = [attempt(slot) for slot in range(40)]
stored = results.index("full")
print(stored > 8, set(results[stored:]))
print(all((get(store, slot) == page(slot)).all() for slot in range(stored)))
subprocess.run(["mount", "-o", "remount,size=1m", folder], check=True)
print({attempt(slot) for slot in range(stored, 40)})
print(all((get(store, slot) == page(slot)).all() for slot in range(40)))
store.close()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
store = disk(folder, records=256)
print(len(store.scan()))
print(attempt(50), (get(store, 30) == page(30)).all())
for slot in range(40): store.drop(slot)
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0,
    reason="no namespaces here",
)
def test_a_file_system_that_is_full_and_then_read_only(tmp_path: Path) -> None:
    command = [*NAMESPACE, sys.executable, "-c", FULL_DISK, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["True {'full'}", "True", "{'stored'}", "True", "40", "io True"]


def test_files_that_vanish_are_failed_loads(tmp_path: Path) -> None:
    store = disk(tmp_path)
    for slot in range(9):
        put(store, slot)
    segments(tmp_path)[0].unlink()
    assert refused(store, 0) == "io"
    assert np.array_equal(get(store, 8), page(8))
    for slot in range(8):
        store.drop(slot)
    put(store, 0)
    store.close()


def replaced_by(path: Path, with_what: Path) -> None:
    """Put another folder in the place of one that is in use."""
    shutil.rmtree(path)
    shutil.copytree(with_what, path)


@pytest.mark.parametrize("what", ["removed", "replaced", "renamed"])
def test_a_folder_in_the_place_of_the_locked_one_is_not_read(what: str, tmp_path: Path) -> None:
    """Its lock went with the folder, so that another server may have made it anew: slot, segment and offset are the
    same there, and the checksum is right."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    store = disk(ours)
    put(store, 0, seed=1)
    other = disk(theirs)
    put(other, 0, seed=2)
    match what:
        case "removed":
            shutil.rmtree(folder_of(ours))
            third = disk(ours)
            put(third, 0, seed=2)
            third.close()
        case "replaced":
            replaced_by(folder_of(ours), folder_of(theirs))
        case "renamed":
            folder_of(ours).rename(tmp_path / "away")
            folder_of(theirs).rename(ours / "0")
    if what == "renamed":
        assert np.array_equal(get(store, 0), page(1)), "it is the same folder under another name"
        put(store, 1)
        assert np.array_equal(get(store, 1), page(1))
    else:
        assert refused(store, 0) == "io"
    store.close()
    other.close()


def test_a_page_with_another_digest_or_salt_is_not_the_one_that_was_stored(tmp_path: Path) -> None:
    """A backup that is copied into the folder has the same files, each of them whole."""
    for name, changed in (("digest", {"digest": b"d" * 32}), ("salt", {"salt": b"s" * 32})):
        store, other = disk(tmp_path / name), disk(tmp_path / f"other-{name}")
        put(store, 0)
        other.put(0, [page(0)], replace(header(0), **changed))
        shutil.copy(*segments(tmp_path / f"other-{name}"), *segments(tmp_path / name))
        assert refused(store, 0) == "checksum", name
        store.close()
        other.close()


def test_a_page_on_disk_needs_a_header(tmp_path: Path) -> None:
    store = disk(tmp_path)
    with pytest.raises(ValueError, match="needs a header"):
        store.put(0, [page(0)], None)
    store.close()
