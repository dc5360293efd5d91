"""An incident of a running pair, opened from its file alone: a stage is killed while prompts are computed."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.cli import commands as cli
from headrace.scheduler.recording.file import read_recording
from headrace.tools.replay.timeline import RequestLife, gather
from tests.e2e.harness import pages_in_use, pair, wait_until
from tests.e2e.strikes import come_back, ranks_of

STUB = "stub:layers=4,vocab=1000,max_len=8192"
COMMON = ("--served-model-name", "m", "--threads", "1", "--kv-pages", "600")
LONG, SHORT = 3000, 200  # tokens


def body(first: int, tokens: int) -> dict[str, object]:
    return {"model": "m", "prompt": [first + at % 400 for at in range(tokens)], "max_tokens": 3, "temperature": 0}


@pytest.mark.full
def test_a_stage_that_is_killed_under_load_is_told_by_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "recordings"
    flags = (
        "--model",
        f"{STUB},us_per_token=400",
        *COMMON,
        "--pp",
        "2",
        "--chunk-tokens",
        "128",
        "--record",
        str(recorded),
    )
    with pair((*flags, "--policy", "fcfs"), ("--model", STUB, *COMMON)) as (prefill, decode):
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(decode.post, "/v1/completions", body(number, SHORT)) for number in range(8)]
        assert {answer.result().status_code for answer in answers} == {200}
        ranks = ranks_of(prefill)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(decode.post, "/v1/completions", body(number, LONG)) for number in range(2)]
            wait_until(lambda: pages_in_use(prefill) > 0, 20, "prompts are computed")
            ranks[1].kill()
        assert all(answer.result().status_code in (502, 503) for answer in answers)
        come_back(prefill, ranks)
        wait_until(lambda: decode.post("/v1/completions", body(7, SHORT)).status_code == 200, 60, "served again")
        wait_until(lambda: list(recorded.glob("*-stage_failed.recording")), 30, "its file")
        (written,) = recorded.glob("*-stage_failed.recording")
        alone = tmp_path / "elsewhere" / "incident.recording"
        alone.parent.mkdir()
        shutil.copy(written, alone)
    shutil.rmtree(recorded)
    capsys.readouterr()

    def asked(*question: str) -> str:
        assert cli.main(["replay", str(alone), *question]) == 0
        return capsys.readouterr().out

    summary = asked("--verbose")
    assert "The same decisions again" in summary
    assert f"(prefill server {prefill.url.removeprefix('http://')}; stage_failed)" in summary.replace(
        "vm:", "127.0.0.1:"
    )
    lives: dict[str, RequestLife] = {life.rid: life for life in gather(read_recording(alone))[0].lives}
    failed = [rid for rid, life in lives.items() if life.outcome == "stage_failed"]
    served = [rid for rid, life in lives.items() if life.outcome == "handoff"]
    assert len(failed) == 2, lives
    assert len(served) >= 8
    story = asked("why", failed[0])
    assert "pass " in story
    assert "it has failed: stage 1 " in story
    assert "(stage_failed, HTTP 503)" in story
    story = asked("why", served[-1])
    assert "it has finished: all of its KV is at its decode server" in story
    assert "; acknowledged 0." in story
    assert "as it was, the model's mean" in asked("diff", "--policy", "srpt").lower()
    asked("picture", "-o", str(tmp_path / "incident.html"))
    assert "stage 1" in (tmp_path / "incident.html").read_text(encoding="utf-8")
