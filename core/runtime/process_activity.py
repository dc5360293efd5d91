"""What a process of this machine does, from /proc (Linux)."""

import os
from contextlib import suppress
from pathlib import Path

from headrace.core.runtime.liveness import Activity

NANOSECONDS = 1e-9
STOPPED = frozenset("Tt")  # by a signal, by a debugger


def read_activity(pid: int) -> Activity | None:
    """What a process does, over all its threads; None if it has ended, or /proc does not say."""
    folder = Path(f"/proc/{pid}/task")
    try:
        threads = os.listdir(folder)
    except OSError:
        return None
    states: list[str] = []
    cpu_s = delay_s = 0.0
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):  # the thread has ended meanwhile
            # 1 (name, which may have parentheses) S …
            states.append((folder / thread / "stat").read_text().rpartition(")")[2].split()[0])
            used, waited = (folder / thread / "schedstat").read_text().split()[:2]
            cpu_s += int(used) * NANOSECONDS
            delay_s += int(waited) * NANOSECONDS
    if not states or states[0] in "ZX":
        return None
    return Activity(
        cpu_s,
        delay_s,
        stopped=states[0] in STOPPED or _frozen(pid),
        runnable="R" in states,
        disk="D" in states,
    )


def _frozen(pid: int) -> bool:
    """Whether the freezer of its cgroup (version 2) has stopped a process: docker pause, a suspended container."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                events = Path(f"/sys/fs/cgroup{line[3:]}/cgroup.events").read_text()
                return "frozen 1" in events.splitlines()
    return False
