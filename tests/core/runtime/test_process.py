"""Child processes end when their parent dies."""

import os
import resource
import signal
import subprocess
import sys
import time

from headrace.core.runtime.process import MAX_HTTP_CONNECTIONS, MAX_SESSIONLESS

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


LIMITS = """
import resource
from headrace.core.runtime.process import max_http_connections, max_sessionless, raise_descriptor_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (200, HARD))
raise_descriptor_limit()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
print(soft, hard, max_sessionless(), max_http_connections())
"""


def limits(hard: int) -> list[int]:
    """Of a process with this hard limit: soft and hard limit, connections without a session at each socket, HTTP's."""
    code = LIMITS.replace("HARD", str(hard))
    return [int(word) for word in subprocess.check_output([sys.executable, "-c", code], text=True).split()]


def test_the_descriptor_limit_is_raised_as_far_as_it_goes() -> None:
    assert limits(1024) == [1024, 1024, 192, 384]
    assert limits(256) == [256, 256, 32, 64]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard, sessionless, http = limits(hard)
    assert soft == hard
    assert sessionless <= MAX_SESSIONLESS
    assert http <= MAX_HTTP_CONNECTIONS
    assert 4 * sessionless < hard, "the sockets of others leave some to the process"
    assert 2 * http < hard
