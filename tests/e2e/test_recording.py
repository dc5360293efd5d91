"""The flight recorder of a running server: its files replay, whatever has written them, and nothing waits for them."""

import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from headrace.core.types.packed import pack
from headrace.scheduler.recording.file import Recording, read_recording
from tests.e2e.harness import Server, running, wait_until
from tests.scheduler.recordings import replayed

STUB = (
    *("--model", "stub:layers=4,vocab=1000,us_per_plan=2000", "--served-model-name", "m", "--dtype", "float32"),
    *("--role", "colocated", "--threads", "1"),
)
PROMPTS = [list(range(first, first + 40)) for first in (100, 300, 500)]
WAIT_S = 30.0


@contextmanager
def recording_server(folder: Path, *flags: str) -> Iterator[Server]:
    with running(Server(*STUB, "--record", str(folder), *flags)) as server:
        yield server


def generate(server: Server) -> None:
    for prompt in PROMPTS:
        body = {"model": "m", "prompt": prompt, "max_tokens": 5, "temperature": 0, "cache_salt": "a secret"}
        assert server.post("/v1/completions", body).status_code == 200


def files(folder: Path, reason: str) -> list[Path]:
    return sorted(folder.glob(f"*-{reason}.recording"))


def only(folder: Path, reason: str) -> Recording:
    """The file that was written for this reason, which replays."""
    wait_until(lambda: files(folder, reason), WAIT_S, f"a file {reason}")
    (path,) = files(folder, reason)
    recording = read_recording(path)
    count, problem = replayed(recording)
    assert not problem, problem
    assert count > 0
    assert path.stat().st_mode & 0o777 == 0o600
    return recording


def submitted(recording: Recording) -> Sequence[object]:
    return [
        call.event for segment in recording.segments for call in segment.calls if type(call.event).__name__ == "Submit"
    ]


def test_files_by_request_and_by_signal_replay(tmp_path: Path) -> None:
    with recording_server(tmp_path) as server:
        generate(server)
        answer = server.post("/debug/record", {})
        assert answer.status_code == 200, answer.text
        recording = only(tmp_path, "request")
        assert answer.json()["file"] == files(tmp_path, "request")[0].name
        assert answer.json()["bytes"] == files(tmp_path, "request")[0].stat().st_size
        assert (recording.header.reason, recording.header.hidden) == ("request", True)
        assert len(submitted(recording)) == len(PROMPTS)
        server.process.send_signal(signal.SIGUSR2)
        only(tmp_path, "signal")
        metrics = server.get("/metrics").text
        for sample in ('recording_files_total{reason="request"} 1', 'recording_files_total{reason="signal"} 1'):
            assert f"headrace_{sample}" in metrics
    assert not any(tmp_path.glob("ring-*/*.snapshot")), "a server that has ended as it was told to leaves no ring"


def notification(status: str, *alerts: tuple[str, str]) -> dict[str, object]:
    """As Alertmanager posts it."""
    labels = {"instance": "prefill:8000", "job": "headrace", "role": "prefill", "severity": "critical"}
    return {
        "version": "4",
        "groupKey": '{}/{alertname=~"Headrace.+"}:{alertname="HeadraceNotReady"}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "headrace-recordings",
        "groupLabels": {"alertname": "HeadraceNotReady"},
        "commonLabels": labels,
        "commonAnnotations": {"runbook_url": "docs/operations.md#headracenotready"},
        "externalURL": "http://alertmanager:9093",
        "alerts": [
            {
                "status": state,
                "labels": {"alertname": name, **labels},
                "annotations": {"summary": "prefill:8000 is alive and would not serve"},
                "startsAt": "2026-11-28T15:50:20.721Z",
                "endsAt": "0001-01-01T00:00:00Z",
                "generatorURL": "http://prometheus:9090/graph?g0.expr=headrace_ready+%3D%3D+0&g0.tab=1",
                "fingerprint": "1a30ba71cca2921f",
            }
            for name, state in alerts
        ],
    }


def test_alerts_that_fire_have_one_file(tmp_path: Path) -> None:
    fires = notification("firing", ("HeadraceNotReady", "firing"), ("HeadraceDown", "resolved"))
    with recording_server(tmp_path) as server:
        generate(server)
        answer = server.post("/debug/record", notification("resolved", ("HeadraceNotReady", "resolved")))
        assert answer.json() == {"file": "", "bytes": 0, "alerts": ""}
        for field, body in {
            "version": {**fires, "version": "5"},
            "status": {**fires, "status": "on fire"},
            "alerts[0].labels": {**fires, "alerts": [{"status": "firing"}]},
            "alerts": {"version": "4", "status": "firing"},
        }.items():
            answer = server.post("/debug/record", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
        assert files(tmp_path, "*") == []
        answer = server.post("/debug/record", fires)
        assert answer.status_code == 200, answer.text
        recording = only(tmp_path, "alert")
        assert answer.json()["file"] == files(tmp_path, "alert")[0].name
        assert answer.json()["alerts"] == "HeadraceNotReady"
        assert recording.header.reason == "alert: HeadraceNotReady"
        assert server.post("/debug/record", fires).json()["file"] == "", "a second one within minutes"
        assert len(files(tmp_path, "alert")) == 1
        assert 'headrace_recording_files_total{reason="alert"} 1' in server.get("/metrics").text
        assert "(alert: HeadraceNotReady)" in server.log


@pytest.mark.full
def test_hidden_token_ids_are_in_no_file(tmp_path: Path) -> None:
    for hidden in (True, False):
        folder = tmp_path / str(hidden)
        with recording_server(folder, *(() if hidden else ("--record-tokens",))) as server:
            generate(server)
            assert server.post("/debug/record", {}).status_code == 200
        prompts = [event.prompt for event in submitted(only(folder, "request"))]  # type: ignore[attr-defined]
        assert (prompts != [pack(prompt) for prompt in PROMPTS]) is hidden
        assert [len(prompt) for prompt in prompts] == [4 * len(prompt) for prompt in PROMPTS]


@pytest.mark.full
def test_a_stage_that_is_killed_leaves_a_file(tmp_path: Path) -> None:
    with recording_server(tmp_path) as server:
        generate(server)
        server.child("headrace.engine.stage").kill()
        recording = only(tmp_path, "stage_failed")
        calls = [call for segment in recording.segments for call in segment.calls]
        assert any(type(call.event).__name__ == "StageFailed" for call in calls)


@pytest.mark.full
def test_a_killed_server_leaves_a_file_at_its_next_start(tmp_path: Path) -> None:
    server = Server(*STUB, "--record", str(tmp_path)).started()
    generate(server)
    wait_until(lambda: any(tmp_path.glob("ring-*/*.snapshot")), WAIT_S, "a segment")
    port = int(server.url.rpartition(":")[2])
    server.kill()
    with running(Server(*STUB, "--record", str(tmp_path), port=port)):
        wait_until(lambda: files(tmp_path, "killed"), WAIT_S, "a file")
    assert read_recording(files(tmp_path, "killed")[0]).segments[0].restore().idle


@pytest.mark.full
def test_a_lost_folder_and_a_full_disk_harm_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with recording_server(folder) as server:
        wait_until(lambda: any(folder.glob("ring-*/*.snapshot")), WAIT_S, "a segment")
        shutil.rmtree(folder)
        folder.write_text("no folder any more")
        answer = server.post("/debug/record", {})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "not_recorded"
        generate(server)
        assert server.log.count("--record: nothing is recorded") == 1
        folder.unlink()
        generate(server)


@pytest.mark.full
def test_without_it_the_route_says_how_to_record() -> None:
    with running(Server(*STUB)) as server:
        answer = server.post("/debug/record", {})
        assert answer.status_code == 409
        assert "--record DIR" in answer.json()["error"]["message"]


@pytest.mark.full
def test_a_folder_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    with closing(Server(*STUB, "--record", str(folder))) as server:
        assert server.ended() != 0
        assert f"--record {folder}: it cannot be written" in server.log
