"""Pages on disk after a crash, a changed byte, or under another model: ignored, counted, and never an error."""

import errno
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from headrace.core.types.kv.geometry import Component
from headrace.engine.kv.tiers.disk_store import DiskStore
from headrace.engine.kv.tiers.pages import TierError
from headrace.engine.kv.tiers.record import HEADER_BYTES, VERSION, Origin, Record, pack_header, parse_header
from tests.engine.kv.tiers.pages import GEOMETRY, ORIGIN, RECORD, disk, get, header, page, put

PACKED = ORIGIN.pack()
RECORDED = Record(header(3), slot=3, segment=7, offset=1536, length=256, checksum=12345678901234567890)


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """The file of a segment with the pages of slots 0 to 2, which no server uses."""
    store = disk(tmp_path)
    for slot in range(3):
        put(store, slot)
    store.close()
    [path] = tmp_path.rglob("segment-*.kv")
    return path


def scanned(segment: Path, origin: Origin = ORIGIN) -> tuple[DiskStore, dict[int, bool | None], dict[str, int]]:
    """The store, whether the bytes of each found slot are right (None: it does not load), and what was ignored."""
    store = disk(segment.parent.parent, origin=origin)
    good: dict[int, bool | None] = {}
    for found in store.scan():
        assert found.header == header(found.slot)
        with suppress(TierError):
            good[found.slot] = np.array_equal(get(store, found.slot), page(found.slot))
        good.setdefault(found.slot, None)
    return store, good, {reason: count for reason, count in store.ignored.items() if count}


def test_headers_are_read_as_they_were_written() -> None:
    packed = pack_header(PACKED, RECORDED)
    assert len(packed) == HEADER_BYTES
    assert packed[:16] == b"HRKVPAGE\x01\x00\x00\x02\x00\x00\x00\x00", "the format of version 1"
    assert parse_header(packed, PACKED) == RECORDED
    assert b"salt" not in packed
    forever = RECORDED._replace(page=replace(RECORDED.page, turn=1 << 40))
    assert isinstance(parse_header(pack_header(PACKED, forever), PACKED), Record)


def test_every_changed_bit_of_a_header_is_found() -> None:
    packed = bytearray(pack_header(PACKED, RECORDED))
    for at in range(HEADER_BYTES):
        for bit in range(8):
            packed[at] ^= 1 << bit
            assert parse_header(bytes(packed), PACKED) == "damaged", (at, bit)
            packed[at] ^= 1 << bit


def test_a_crash_at_every_byte(segment: Path) -> None:
    """What was written whole before is found; the rest is not, and the next server goes on."""
    whole = segment.read_bytes()
    for length in range(len(whole) + 1):
        segment.write_bytes(whole[:length])
        store, good, ignored = scanned(segment)
        assert good == dict.fromkeys(range(length // RECORD), True)
        assert ignored == ({"short": 1} if length % RECORD else {})
        if length % RECORD in (0, 1, HEADER_BYTES):
            put(store, 5)
            assert np.array_equal(get(store, 5), page(5))
        store.close()
        for path in segment.parent.glob("segment-*.kv"):
            path.unlink()


@pytest.mark.parametrize("record", [0, 1, 2])
def test_every_changed_byte_of_a_segment_costs_its_page_alone(segment: Path, record: int) -> None:
    whole = segment.read_bytes()
    for at in range(record * RECORD, (record + 1) * RECORD, 3):
        changed = bytearray(whole)
        changed[at] ^= 0x10
        segment.write_bytes(changed)
        store, good, ignored = scanned(segment)
        store.close()
        others = {slot: True for slot in range(3) if slot != record}
        if at % RECORD < HEADER_BYTES:
            assert (good, ignored) == (others, {"damaged": 1})
        else:
            assert (good, ignored) == ({**others, record: None}, {})


def test_zeros_as_a_crash_of_the_machine_leaves_them(segment: Path) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(whole[:RECORD] + bytes(2 * RECORD))
    store, good, ignored = scanned(segment)
    assert (good, ignored) == ({0: True}, {"damaged": 2})
    store.close()


def test_a_record_at_another_place_is_not_used(segment: Path) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(whole[RECORD:] + whole[:RECORD])
    copy = segment.with_name("segment-0000000009.kv")
    copy.write_bytes(whole)
    store, good, ignored = scanned(segment)
    assert (good, ignored) == ({}, {"damaged": 6})
    store.close()


def test_a_disk_that_returns_older_bytes_is_found_out(segment: Path) -> None:
    store, *_ = scanned(segment)
    whole = segment.read_bytes()
    segment.write_bytes(whole[:RECORD] + whole[:RECORD] + whole[2 * RECORD :])
    with pytest.raises(TierError) as raised:
        get(store, 1)
    assert raised.value.reason == "checksum"
    store.close()


FOREIGN = [
    replace(ORIGIN, fingerprint="e" * 32),
    replace(ORIGIN, stage=0),
    replace(ORIGIN, shard=1),
    replace(ORIGIN, shards=2),
    *(
        replace(ORIGIN, geometry=replace(GEOMETRY, **change))
        for change in (
            {"dtype": "bfloat16"},
            {"page_size": 8},
            {"layers": 1},
            {"layer_start": 2},
            {"kv_heads": 2},
            {"head_start": 1},
            {"head_dim": 8},
            {"components": (Component("draft", "float32", layers=1, kv_heads=1, head_dim=4),)},
        )
    ),
]


@pytest.mark.parametrize("origin", FOREIGN, ids=lambda origin: str(FOREIGN.index(origin)))
def test_pages_of_another_model_geometry_or_stage_are_foreign(segment: Path, origin: Origin) -> None:
    """Put where this origin looks for its own."""
    own = disk(segment.parent.parent / "other", origin=origin)
    own.close()
    [folder] = (segment.parent.parent / "other").iterdir()
    moved = folder / segment.name
    moved.write_bytes(segment.read_bytes())
    store, good, ignored = scanned(moved, origin)
    assert (good, ignored) == ({}, {"foreign": 3})
    assert moved.exists()
    store.close()


def test_foreign_segments_are_the_first_to_make_room(segment: Path) -> None:
    names = [segment.with_name(f"segment-{number:010}.kv") for number in range(1, 4)]
    for name in names:  # misplaced, so not usable
        name.write_bytes((segment.read_bytes() * 3)[: 8 * RECORD])
    store, good, ignored = scanned(segment)
    assert (list(good), ignored) == ([0, 1, 2], {"damaged": 24})
    put(store, 10)
    assert [name.exists() for name in [segment, *names]] == [True, False, True, True]
    assert store.take_lost() == []
    store.close()


def test_another_version_of_the_format_is_left_alone(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.kv.tiers.record.VERSION", VERSION + 1)
    store, good, ignored = scanned(segment)
    assert (good, ignored) == ({}, {"version": 1})
    assert segment.exists()
    store.close()


def test_other_files_and_unreadable_ones(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = segment.parent
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-1.kv").write_text("not a name of ours")
    (folder / "segment-0000000001.kv").symlink_to("/etc/hostname")
    (folder / "segment-0000000002.kv").mkdir()
    (folder / "segment-0000000003.kv").write_bytes(b"")
    store, good, ignored = scanned(segment)
    assert (list(good), ignored) == ([0, 1, 2], {"unreadable": 2})
    put(store, 5)
    assert np.array_equal(get(store, 5), page(5)), "numbered after those"
    store.close()
    assert (folder / "notes.txt").read_text() == "mine"

    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("headrace.engine.kv.tiers.segments.os.pread", fails)
    store, good, ignored = scanned(segment)
    assert good == {}
    assert ignored == {"unreadable": 4}
    store.close()
