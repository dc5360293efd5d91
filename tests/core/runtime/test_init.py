"""The init of a container: orphans are reaped, the command's own children are not, signals and statuses pass
through."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

# A process to which the kernel gives orphans, as it does to PID 1 (PR_SET_CHILD_SUBREAPER).
INIT = """
import asyncio, ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1)
from headrace.core.runtime.signals import be_init
if (status := be_init()) is not None:
    sys.exit(status)
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its init, as in a namespace
"""


@contextmanager
def container(code: str) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen([sys.executable, "-c", INIT + code], stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def line(made: "subprocess.Popen[str]") -> str:
    assert made.stdout is not None
    return made.stdout.readline().strip()


def states(parent: int) -> list[str]:
    """Of the children of a process."""
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        children = file.read().split()
    found = []
    for child in children:
        with (
            suppress(FileNotFoundError, ProcessLookupError),
            open(f"/proc/{child}/stat") as file,
        ):  # it was reaped since
            found.append(file.read().rpartition(")")[2].split()[0])
    return found


def test_orphans_are_reaped_and_own_children_keep_their_status() -> None:
    code = """
subprocess.run(["sh", "-c", "for i in 1 2 3 4 5; do (sleep 0.2 &); done"])
async def wait():
    made = [await asyncio.create_subprocess_exec("sh", "-c", f"exit {n}") for n in (3, 4, 5)]
    return [await each.wait() for each in made]
print(asyncio.run(wait()), subprocess.call(["sh", "-c", "exit 6"]), flush=True)
time.sleep(60)
"""
    with container(code) as made:
        assert line(made) == "[3, 4, 5] 6"
        deadline = time.monotonic() + 20
        while len(found := states(made.pid)) != 1:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        assert "Z" not in found


@pytest.mark.parametrize(("end", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_the_status_of_the_command_is_that_of_the_container(end: str, status: int) -> None:
    with container(end) as made:
        assert made.wait(20) == status


def test_signals_reach_the_command_and_end_it_where_it_has_no_handler() -> None:
    """PID 1 itself would not be ended by a signal that it does not handle."""
    code = """
taken = []
signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
signal.signal(signal.SIGRTMIN + 3, lambda number, _: taken.append(number))
print("ready", flush=True)
while len(taken) < 2:
    time.sleep(0.02)
print(sorted(taken), flush=True)
time.sleep(60)
"""
    with container(code) as made:
        assert line(made) == "ready"
        made.send_signal(signal.SIGTERM)
        made.send_signal(signal.SIGRTMIN + 3)
        assert line(made) == str([int(signal.SIGTERM), signal.SIGRTMIN + 3])
        made.send_signal(signal.SIGHUP)
        assert made.wait(20) == 128 + signal.SIGHUP


def test_ctrl_c_in_the_terminal_of_a_container_comes_once() -> None:
    """`docker run -it`: the terminal sends it to the whole group in the foreground, the init passes on what it gets."""
    code = """
signal.signal(signal.SIGINT, lambda number, _: print("taken", flush=True))
print("ready", flush=True)
for _ in range(50):
    time.sleep(0.02)
print("over", flush=True)
"""
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", INIT + code])
    with os.fdopen(terminal, "r+b", buffering=0) as ours:
        text = b""
        while b"ready" not in text:
            text += ours.read(100)
        ours.write(b"\x03")
        while b"over" not in text:
            text += ours.read(100)
        assert text.count(b"taken") == 1
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_command_in_a_namespace_of_its_own() -> None:
    """As root: `headrace` is PID 1 there, and does what it does elsewhere."""
    command = (
        "unshare",
        "-p",
        "-f",
        "--mount-proc",
        sys.executable,
        "-m",
        "headrace.cli.main",
        "check",
        "--port",
        "x",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr:
        pytest.skip("no namespace can be made here")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headrace: ")
