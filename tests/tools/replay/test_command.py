"""The command headrace replay: the state at a time, steps, mistakes in one line."""

import io
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import commands as cli
from headrace.scheduler.recording.file import read_recording
from headrace.tools.replay import steps
from headrace.tools.replay.playback import Playback
from tests.scheduler.bench import Bench
from tests.tools.replay.tapes import taped, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three prompts, one of which is too long for what is left of the pool, three passes of a tenth of a second."""
    with taped() as tapes:
        bench = Bench(chunk_tokens=8, kv_pages=8, pipeline_depth=0, prefix_cache=False, policy="fcfs")
        for rid, tokens in (("a", 16), ("b", 12), ("c", 20)):
            bench.submit(rid, [len(rid)] * tokens, max_tokens=1)
        for _ in range(3):
            forward = bench.plan()
            assert forward is not None
            bench.now += 0.1
            bench.done(forward, *[1 for row in forward.rows if row.sample is not None])
        bench.plan()
    return write(tapes[0], tmp_path, every=4)


def test_the_state_at_a_time(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(path), "--at", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0.100 s (2025-11-24 ")
    assert lines[0].endswith(" of 11 calls")
    text = "\n".join(lines)
    assert "queues    bootstrap 0 (0 tokens), waiting 2 (32 tokens), running 1 (16 tokens)" in text
    assert "pages     4 free, 0 cached, 4 leased of 8" in text
    assert "passes    1 of 1 in flight" in text
    assert "8 tokens in 1 row, for 0.000 s: a to 16" in text
    assert "waiting   2\n  b: 0 of 12 tokens computed, waiting for 0.100 s: " in text
    assert "c: 0 of 20 tokens computed, waiting for 0.100 s: it needs 5 pages and lacks 1: 4 are free" in text


def test_steps_are_a_listing_where_there_is_no_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(path), "--step", "--at", "0.2"]) == 0
    *rest, last = capsys.readouterr().out.splitlines()
    assert last == "the recording ends here"
    assert cli.main(["replay", str(path), "--step"]) == 0
    *everything, _ = capsys.readouterr().out.splitlines()
    assert len(everything) == 11
    assert everything[-len(rest) :] == rest
    assert "StageReady" in everything[0]
    assert "Submit a: 16 tokens, DecodeHere → no effects" in everything[1]
    assert "plan → Forward " in everything[4]
    assert "a [0, 8)" in everything[4]


def test_stepping_forward_and_back(path: Path) -> None:
    typed: Iterator[str] = iter(["", "3", "-", "-2", "@0.1", "/b", "s", "?", "@x", "99", "", "q"])
    out = io.StringIO()
    steps.interact(Playback(read_recording(path)), lambda _prompt: next(typed), out)
    shown = out.getvalue()
    assert shown.count("after 3 of 11 calls") == 1
    assert shown.count("after 1 of 11 calls") == 1
    assert shown.count("the recording ends here") == 2
    assert shown.count(steps.HELP) == 3
    assert "(not as recorded)" not in shown
    end = io.StringIO()

    def closed(_prompt: str) -> str:
        raise EOFError

    steps.interact(Playback(read_recording(path)), closed, end)
    assert end.getvalue().endswith(f"{steps.HELP}\n")


MISTAKES = [
    (["replay"], "FILE"),
    (["replay", "/nowhere/x.recording"], "/nowhere/x.recording: No such file or directory"),
    (["replay", "/"], "Is a directory"),
    (["replay", "{path}", "wy"], "invalid choice: 'wy'"),
    (["replay", "{path}", "why"], "REQUEST"),
    (["replay", "{path}", "why", "d"], "the recording has no request 'd'; "),
    (["replay", "{path}", "picture"], "-o"),
    (["replay", "{path}", "--verbos"], "unknown argument --verbos; did you mean --verbose?"),
    (["replay", "{path}", "--at", "0.4"], "--at: expected seconds from 0 to 0.300, the length of it, got '0.4'"),
    (["replay", "{path}", "--at", "nan"], "got 'nan'"),
    (["replay", "{path}", "--at", "1", "why", "a"], "--at does not go with why"),
    (["replay", "{path}", "picture", "-o", "x.html", "--from", "0.2", "--to", "0.1"], "nothing from 0.2 s to 0.1 s"),
    (["replay", "{path}", "picture", "-o", "x.html", "--to", "9"], "--to: expected seconds from 0 to 0.300"),
    (["replay", "{path}", "diff", "--polcy", "slo"], "unknown argument --polcy; did you mean --policy?"),
    (["replay", "{path}", "diff", "--policy", "lifo"], "--policy"),
    (["replay", "{path}", "diff", "--replicas", "0"], "--replicas: expected whole numbers from 1"),
    (["replay", "{path}", "diff", "--page-size", "8"], "unknown argument --page-size"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value))
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([argument.format(path=path) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headrace: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("content", [b"", b"HRRECORD", b"\x00" * 100, b'{"timestamp": 1}\n'])
def test_what_is_no_recording(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert cli.main(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"headrace: {path}: ")
    assert err.count("\n") == 1


def test_on_a_terminal_it_asks(path: Path) -> None:
    """A pseudo-terminal: a prompt, the next call, back again, and out."""
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "headrace.cli.commands", "replay", str(path), "--step"]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = ""
        try:
            for typed, expected in ((b"\n", "StageReady"), (b"-\n", "after 0 of 11 calls"), (b"q\n", "left")):
                shown = _read_until(master, shown, steps.PROMPT)
                os.write(master, typed)
                shown = _read_until(master, shown, expected)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    os.close(master)


def _read_until(descriptor: int, text: str, expected: str) -> str:
    """Read on until this has come. text: that was read and not looked at. Returns what was read behind it."""
    while expected not in text:
        ready, _, _ = select.select([descriptor], [], [], 30)
        assert ready, f"not within 30 s: {expected!r} in {text!r}"
        text += os.read(descriptor, 4096).decode()
    return text.partition(expected)[2]
