"""Child processes end when their parent dies."""

import os
import signal
import subprocess
import sys
import time

CHILD = """
import os, sys, time
from headrace.core.runtime.process import die_with_parent
sys.stdin.read()
die_with_parent(int(sys.argv[1]))
print("lives", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())], stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.readline()
child.stdin.close()
sys.stdin.read()
"""


def ended(pid: int) -> bool:
    """Whether the process ends within seconds; an orphan may stay a zombie where init does not reap it."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def parent() -> "tuple[subprocess.Popen[str], int]":
    made = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    return made, int(made.stdout.readline())


def test_a_child_ends_when_its_parent_is_killed() -> None:
    made, child = parent()
    with made:
        assert made.stdin is not None
        assert made.stdout is not None
        made.stdin.write("\n")
        made.stdin.flush()
        assert made.stdout.readline() == "lives\n"
        made.kill()
    assert ended(child)


def test_a_child_ends_when_its_parent_died_before_prctl() -> None:
    made, child = parent()
    with made:
        made.kill()  # the child reads the end of its input, and only then calls prctl
        made.wait()
        assert made.stdout is not None
        assert made.stdout.read() == "", "it went on without a parent"
    assert ended(child)
