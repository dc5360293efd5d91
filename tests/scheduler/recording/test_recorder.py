"""The flight recorder around a scheduler: the ring and the files that real children write, in a clock moved by hand."""

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.messages.frontend import QueryStats, Shutdown, Submit, WriteRecording
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import RecordingWritten
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageFailed, StageSilence
from headrace.core.stats import Stats
from headrace.core.types.errors import ConfigError
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams
from headrace.scheduler.lifecycle import integrity
from headrace.scheduler.recording import recorder as module
from headrace.scheduler.recording import store as store_module
from headrace.scheduler.recording.file import Header, read_recording
from headrace.scheduler.recording.hiding import Hiding
from headrace.scheduler.recording.recorder import BETWEEN_ALERTS_S, SEGMENT_S, FlightRecorder
from headrace.scheduler.recording.store import RecordingStore
from headrace.scheduler.scheduler import Scheduler
from tests.scheduler.bench import Bench
from tests.scheduler.recordings import replayed

WAIT_S = 30.0


class Flight:
    """A recorder whose loop is turned by hand."""

    def __init__(self, folder: Path, keep_s: float = 300.0) -> None:
        self.folder = folder
        bench = Bench(kv_pages=512)
        self.now = bench.now
        self.replies: list[RecordingWritten] = []
        config = bench.config
        self.recorder = FlightRecorder(
            bench.scheduler,
            RecordingStore(folder, "test"),
            Header(version="1", python="3", config=config, hidden=True, wall_offset_s=0.0),
            Hiding(bytes(32), config.vocab_size, config.page_size),
            keep_s=keep_s,
            clock=lambda: self.now,
            wall=lambda: 1_800_000_000.0 + self.now,
            reply=self.replies.append,
        )
        self.source = self.recorder.source
        self.requests = 0

    def pass_time(self, seconds: float) -> None:
        """Let time pass; whatever is due is written, and waited for."""
        end = self.now + seconds
        while (due := self.source.next_deadline()) is not None and due <= end:
            if self.source.sockets():
                break
            self.now = max(self.now, due)
            self.source.tick(self.now)
            self.wait()
        self.now = end

    def wait(self) -> None:
        """Until the child has ended."""
        deadline = time.monotonic() + WAIT_S
        while self.source.sockets():
            assert time.monotonic() < deadline
            select.select(self.source.sockets(), [], [], 1.0)
            self.source.receive(self.now)

    def serve(self, count: int = 3) -> None:
        """Requests that are computed."""
        for _ in range(count):
            self.requests += 1
            prompt = pack(range(self.requests, self.requests + 10))
            self.recorder.handle(
                Submit(rid=f"r{self.requests}", prompt=prompt, sampling=SamplingParams(max_tokens=1)), self.now
            )
            (forward,) = self.recorder.plan(self.now)
            assert isinstance(forward, Forward)
            sample = SampledToken(forward.rows[0].request, 1)
            self.recorder.handle(PlanDone(stage=0, seq=forward.seq, duration_s=0.003, samples=(sample,)), self.now)
            assert not self.recorder.plan(self.now)

    def files(self, reason: str = "*") -> list[Path]:
        return sorted(self.folder.glob(f"*-{reason}.recording"))

    def ring(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("ring-test/*.*.*"))


@pytest.fixture
def flight(tmp_path: Path) -> Iterator[Flight]:
    found = Flight(tmp_path)
    yield found
    found.recorder.close()


def samples(stats: Stats) -> dict[str, float]:
    return {" ".join((sample.name, *sample.labels)): sample.value for sample in stats.samples}


def check(path: Path, requests: int) -> None:
    """The file replays, and has so many requests."""
    recording = read_recording(path)
    count, problem = replayed(recording)
    assert (problem, count > 0) == ("", True)
    events = [call.event for segment in recording.segments for call in segment.calls]
    assert sum(isinstance(event, Submit) for event in events) == requests


def test_segments_of_the_last_minutes_are_kept(tmp_path: Path) -> None:
    flight = Flight(tmp_path, keep_s=2.5 * SEGMENT_S)
    flight.pass_time(1.0)
    assert flight.ring() == ["00000000.1.snapshot"]
    for _ in range(5):
        flight.serve()
        flight.pass_time(SEGMENT_S)
    kept = ["00000002", "00000003", "00000004"]
    expected = [f"{number}.{part}" for number in kept for part in ("1.snapshot", "2.calls")]
    assert flight.ring() == [*expected, "00000005.1.snapshot"]
    flight.serve()
    flight.recorder.handle(WriteRecording(token=7, reason="request"), flight.now)
    flight.pass_time(0.1)
    (path,) = flight.files("request")
    assert flight.replies == [RecordingWritten(token=7, name=path.name, bytes=path.stat().st_size)]
    check(path, requests=12)
    assert read_recording(path).header.written_at == pytest.approx(1_800_000_000.0 + flight.now)
    counted = samples(flight.recorder.statistics())
    assert counted["recording_segments_total"] == 6
    assert counted["recording_files_total request"] == 1
    flight.recorder.close()


def test_a_ring_that_is_too_large_loses_its_oldest_segments(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    flight.pass_time(1.0)
    size = sum(path.stat().st_size for path in flight.folder.glob("ring-test/*.snapshot"))
    monkeypatch.setattr(store_module, "MAX_RING_BYTES", 3 * size)
    for _ in range(5):
        flight.serve()
        flight.pass_time(SEGMENT_S)
    assert 1 <= len(flight.ring()) <= 4
    assert flight.ring()[-1] == "00000005.1.snapshot"


def test_a_stage_that_fails_or_falls_silent_writes_a_file_that_has_what_follows(flight: Flight) -> None:
    flight.pass_time(1.0)
    flight.serve()
    flight.recorder.handle(StageSilence(stage=0, reason=""), flight.now)
    flight.pass_time(10.0)
    assert not flight.files()
    flight.recorder.handle(StageSilence(stage=0, reason="is stopped"), flight.now)
    flight.serve()  # while the alarm waits
    flight.pass_time(10.0)
    (path,) = flight.files("stage_failed")
    check(path, requests=6)
    flight.recorder.handle(StageFailed(stage=0, message="killed"), flight.now)
    flight.pass_time(10.0)
    assert len(flight.files()) == 1, "one alarm in a minute"
    flight.pass_time(60.0)
    flight.recorder.handle(StageFailed(stage=0, message="killed"), flight.now)
    flight.pass_time(10.0)
    assert len(flight.files()) == 2


def test_a_failed_integrity_check_writes_one_file(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    flight.pass_time(1.0)
    flight.serve()
    monkeypatch.setattr(integrity, "check", lambda _state: ["page 7 is lost"])
    for token in range(3):
        flight.recorder.handle(QueryStats(token=token), flight.now)
        flight.pass_time(90.0)
    assert len(flight.files("integrity")) == 1


def test_an_exception_is_written_at_once_with_the_call_that_has_raised(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight.pass_time(1.0)
    flight.serve()

    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(Scheduler, "_front_end_request", broken)
    event = Submit(rid="last", prompt=pack(range(5)), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ZeroDivisionError) as caught:
        flight.recorder.handle(event, flight.now)
    flight.recorder.flush(caught.value)
    monkeypatch.undo()
    (path,) = flight.files("exception")
    last = read_recording(path).segments[-1].calls[-1]
    assert (last.raised, last.event and type(last.event)) == ("ZeroDivisionError: a mistake", Submit)


def test_a_child_that_is_killed_is_counted_and_the_next_one_writes(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    flight.pass_time(1.0)
    flight.serve()
    flight.now += SEGMENT_S
    with monkeypatch.context() as patch:
        patch.setattr(FlightRecorder, "_write_segment", lambda *_: time.sleep(60))
        flight.source.tick(flight.now)
    child = flight.recorder._child
    assert child is not None
    os.kill(child._process, signal.SIGKILL)
    flight.wait()
    assert samples(flight.recorder.statistics())["recording_failures_total"] == 1
    flight.serve()  # not recorded: there is no snapshot before it
    flight.pass_time(SEGMENT_S)
    flight.serve()
    flight.recorder.handle(WriteRecording(token=1, reason="signal"), flight.now)
    flight.pass_time(1.0)
    (path,) = flight.files("signal")
    check(path, requests=3)
    assert [segment.number for segment in read_recording(path).segments] == [0, 2], "the gap shows"


def test_a_folder_that_is_lost_is_told_once_and_recording_goes_on(
    flight: Flight, caplog: pytest.LogCaptureFixture
) -> None:
    flight.pass_time(1.0)
    ring = flight.folder / "ring-test"
    for path in ring.iterdir():
        path.unlink()
    ring.rmdir()
    ring.write_text("no folder")
    for token in range(3):
        flight.serve()
        flight.recorder.handle(WriteRecording(token=token, reason="request"), flight.now)
        flight.pass_time(SEGMENT_S)
    assert [bool(reply.error) for reply in flight.replies] == [True] * 3
    assert sum("nothing is recorded" in record.message for record in caplog.records) == 1
    ring.unlink()
    flight.pass_time(SEGMENT_S)
    assert sum("recording again" in record.message for record in caplog.records) == 1
    flight.serve()
    flight.recorder.handle(WriteRecording(token=9, reason="request"), flight.now)
    flight.pass_time(1.0)
    check(flight.files("request")[-1], requests=3)


def test_calls_are_given_up_while_a_child_takes_too_long(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    flight.pass_time(1.0)
    monkeypatch.setattr(module, "MOST_CALLS", 20)
    monkeypatch.setattr(FlightRecorder, "_write_segment", lambda *_: time.sleep(60))
    flight.now += SEGMENT_S
    flight.source.tick(flight.now)
    flight.serve(30)
    assert flight.source.next_deadline() == 0.0
    flight.source.tick(flight.now)
    assert len(flight.recorder._calls) == 0


def test_the_oldest_files_go(flight: Flight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_INCIDENTS", 3)
    flight.pass_time(1.0)
    for token in range(5):
        flight.serve()
        flight.recorder.handle(WriteRecording(token=token, reason="request"), flight.now)
        flight.pass_time(1.0)
    assert [path.name for path in flight.files()] == [reply.name for reply in flight.replies[-3:]]


def test_alerts_have_a_file_in_five_minutes_and_again_after_a_failure(
    flight: Flight, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> int:
        raise OSError("the disk is full")

    def alert(token: int) -> RecordingWritten:
        flight.serve()
        about = WriteRecording(token=token, reason="alert", alerts="HeadraceNotReady")
        flight.recorder.handle(about, flight.now)
        flight.pass_time(1.0)
        return flight.replies[-1]

    flight.pass_time(1.0)
    assert alert(1).name == flight.files("alert")[0].name
    assert read_recording(flight.files("alert")[0]).header.reason == "alert: HeadraceNotReady"
    for token in (2, 3):
        assert alert(token) == RecordingWritten(token=token, name="")
    flight.recorder.handle(WriteRecording(token=4, reason="request"), flight.now)
    flight.pass_time(BETWEEN_ALERTS_S)
    assert flight.files("request"), "others are written meanwhile"
    with monkeypatch.context() as patched:
        patched.setattr(RecordingStore, "incident", full)
        assert alert(5).error == "the disk is full"
    assert alert(6).name


def test_the_ring_of_a_server_that_was_killed_becomes_a_file(tmp_path: Path) -> None:
    killed = Flight(tmp_path)
    killed.pass_time(1.0)
    killed.serve()
    killed.pass_time(SEGMENT_S)
    killed.recorder.close()  # without Shutdown
    flight = Flight(tmp_path)
    flight.pass_time(1.0)
    (path,) = flight.files("killed")
    check(path, requests=3)
    flight.recorder.handle(Shutdown(), flight.now)
    flight.recorder.close()
    assert flight.ring() == []
    again = Flight(tmp_path)
    again.pass_time(1.0)
    assert len(again.files()) == 1
    again.recorder.close()


def test_a_folder_is_recorded_in_by_one_server_of_a_name(flight: Flight) -> None:
    with pytest.raises(ConfigError, match="another server records there as test"):
        RecordingStore(flight.folder, "test")
    RecordingStore(flight.folder, "other").close()


def test_a_folder_that_cannot_be_made_is_a_mistake_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--record \S+/file: it cannot be written: "):
        RecordingStore(tmp_path / "file", "test")
