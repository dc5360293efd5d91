"""Files of recordings: what is read from whom, and what is said of files that cannot be read."""

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Forward
from headrace.scheduler.recording import file as module
from headrace.scheduler.recording.digest import digest
from headrace.scheduler.recording.file import RecordingError, apply, read_recording
from tests.scheduler.bench import Bench
from tests.scheduler.recordings import replayed, taped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with taped() as tapes:
        bench = Bench()
        bench.submit("a", 10, max_tokens=1)
        forward = bench.plan()
        assert forward is not None
        bench.done(forward, 7)
        bench.wait(1.0)
    found = tmp_path / "some.recording"
    assert tapes[0].write(found)
    return found


def test_a_file_says_what_happened_and_does_it_again(path: Path) -> None:
    recording = read_recording(path)
    (segment,) = recording.segments
    assert [call.kind for call in segment.calls] == ["handle", "handle", "plan", "handle"]
    assert isinstance(segment.calls[1].event, Submit)
    scheduler = segment.restore()
    for call in segment.calls[:2]:
        apply(scheduler, call)
    forked = segment.restore()
    for call in segment.calls[:2]:
        apply(forked, call)
    assert isinstance(apply(scheduler, segment.calls[2])[0], Forward)
    assert digest(apply(forked, segment.calls[2])) == segment.calls[2].digest, "each restore() is another scheduler"
    assert replayed(recording) == (4, "")


def test_digests_tell_what_was_decided_otherwise(path: Path) -> None:
    segment = read_recording(path).segments[0]
    scheduler = segment.restore()
    found = [digest(apply(scheduler, call)) for call in (segment.calls[0], segment.calls[2])]
    assert found[0] == segment.calls[0].digest
    assert found[1] == 0 != segment.calls[2].digest, "no prompt, no plan"


def test_what_is_no_recording_is_an_error_of_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = path.read_bytes()
    for changed, text in (
        (b"", "it is no recording"),
        (b"PK\3\4 something else", "it is no recording"),
        (data[:8] + struct.pack("<I", 2) + data[12:], "it has format 2; this version of Headrace reads format 1"),
        (data[:12] + struct.pack("<I", 1 << 30) + data[16:], "its header has 1073741824 bytes"),
        (data[:16] + b"\xc1" + data[17:], "it is damaged, or of another version"),
        (data[:-1], "it ends within a section: it was cut off"),
        (data[: len(data) // 2], "it ends within a section: it was cut off"),
        (data + b"S", "it ends within a section: it was cut off"),
        (data + b"X" * module._SECTION.size, "it is damaged: there is a section of no kind"),
    ):
        path.write_bytes(changed)
        with pytest.raises(RecordingError) as caught:
            read_recording(path)
        assert text in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(RecordingError, match="No such file"):
        read_recording(path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 100)
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="it has more than"):
        read_recording(path)


def test_a_section_that_unpacks_to_more_than_it_says_is_not_unpacked_further(path: Path) -> None:
    data = path.read_bytes()
    start = module._START.size + module._START.unpack_from(data)[2]
    bomb = zlib.compress(bytes(64 << 20))
    section = module._SECTION.pack(b"S", 0, 0.0, 1000, len(bomb), 0)
    path.write_bytes(data[:start] + section + bomb)
    with pytest.raises(RecordingError, match="it is damaged"):
        read_recording(path).segments[0].restore()
    section = module._SECTION.pack(b"S", 0, 0.0, 1 << 40, len(bomb), 0)
    path.write_bytes(data[:start] + section + bomb)
    with pytest.raises(RecordingError, match="it has a section of more than 1024 MiB"):
        read_recording(path)


@given(st.data())
@settings(max_examples=100)
def test_damaged_files_are_errors(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole = whole_file(tmp_path_factory)
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.recording"
    path.write_bytes(changed)
    problem = ""
    try:
        for segment in read_recording(path).segments:
            segment.restore()
            list(segment.calls)
    except RecordingError as error:
        problem = str(error)
    assert "\n" not in problem


_whole: list[bytes] = []


def whole_file(folders: pytest.TempPathFactory) -> bytes:
    """A recording of a few calls."""
    if not _whole:
        with taped() as tapes:
            Bench().submit("a", 10)
        path = folders.mktemp("whole") / "file"
        assert tapes[0].write(path)
        _whole.append(path.read_bytes())
    return _whole[0]
