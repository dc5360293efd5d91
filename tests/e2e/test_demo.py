"""`headrace demo` from outside: what it compares, and that it ends in one sentence whatever happens."""

import argparse
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from headrace.cli import demo

STUB = ("--model", "stub:layers=4,hidden=32,us_per_token=20")
SLOW = ("--model", "stub:layers=4,hidden=32,us_per_token=5000")  # the long prompt takes 20 s


class Demo:
    """A demonstration in a session of its own, and what it has said."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli.commands", "demo", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until(self, words: str) -> None:
        """Read on until a line has these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if words in line:
                return
        raise AssertionError(f"it never said {words!r}:\n" + "\n".join(self.lines))

    def servers(self) -> list[psutil.Process]:
        """Its servers, and their children."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def server(self, role: str) -> psutil.Process:
        return next(each for each in self.servers() if f"--role {role}" in " ".join(each.cmdline()))

    def ended(self) -> int:
        """Its exit status, when it has said all."""
        assert self.process.stdout is not None
        self.lines += [line.rstrip() for line in self.process.stdout]
        self.process.stdout.close()
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def running(*flags: str) -> Iterator[Demo]:
    """A demonstration that ends without a traceback and without a process left behind."""
    made = Demo(*flags)
    started: list[psutil.Process] = []
    try:
        made.until("2. four prompts")
        started = made.servers()
        yield made
    finally:
        if made.process.poll() is None:
            made.close()
        _, alive = psutil.wait_procs(started, timeout=10)
        print("\n".join(made.lines))
        assert not alive
        assert not any("Traceback" in line for line in made.lines)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("float32", "have to equal those of one"),
        pytest.param("bfloat16", "have to equal those of one", marks=pytest.mark.full),
        pytest.param("float16", "may differ from those of", marks=pytest.mark.full),
    ],
)
def test_texts_are_compared_in_the_dtype_that_it_names(dtype: str, words: str) -> None:
    with running(*STUB, "--dtype", dtype) as shown:
        assert shown.ended() == 0
        assert f"in {dtype}: " in shown.lines[0]
        assert words in " ".join(shown.lines[:2])
        assert shown.lines[-1] == "checksum failures: 0; texts equal: 4 of 4"


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_stops_the_servers(number: int) -> None:
    with running(*SLOW) as shown:
        shown.process.send_signal(number)
        assert shown.ended() == 130
        assert shown.lines[-1] == "interrupted; the servers are stopped"


@pytest.mark.full
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_that_dies_is_named(role: str) -> None:
    with running(*SLOW) as shown:
        shown.server(role).kill()
        assert shown.ended() == 1
        assert shown.lines[-1] == f"failed: the {role} server ended with status -9"


@pytest.mark.full
def test_a_stage_that_dies_is_named() -> None:
    with running(*SLOW) as shown:
        stages = [each for each in shown.server("decode").children() if "headrace.engine.stage" in each.cmdline()]
        stages[0].kill()
        assert shown.ended() == 1
        assert "failed: " in shown.lines[-1]
        assert "stage 0" in shown.lines[-1]


@pytest.mark.full
def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr("headrace.server.launch.local_server.free_port", lambda: listener.getsockname()[1])
        assert demo.main(argparse.Namespace(model=STUB[1], dtype="float32"), {}) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"failed: the (prefill|decode) server ended with status 2: ", last), last  # the one that ends first
    assert "address already in use" in last


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--dtype", "bfloat61"),
            "expected one of auto, float32, bfloat16, float16, got 'bfloat61'; did you mean bfloat16?",
        ),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(flags: tuple[str, ...], words: str) -> None:
    made = Demo(*flags)
    assert made.ended() == 2
    (line,) = made.lines
    assert line.startswith("headrace: ")
    assert words in line
