"""Cores that this process may use: its affinity, and the CPU quotas of the control groups that it is in.

A quota (docker --cpus, a limit of a Kubernetes pod, CPUQuota= of a unit) leaves all cores of a machine in sight and
stops the process for the rest of each period, 100 ms as a rule, once the time is used up. Threads that wait for each
other at every layer must not be more than the quota pays for: all of them stand when one is stopped.

    cgroup v2   cpu.max = "150000 100000"                            of the own group and of each one above it
    cgroup v1   cpu.cfs_quota_us = 150000, cpu.cfs_period_us = 100000
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")


def usable_cores(proc: Path = PROC, root: Path = Path("/")) -> int:
    """Whole cores that this process may use, at least 1: a quota is rounded down, since the rest of it is for the
    threads that do not compute.

    Args:
        proc: the folder with its cgroup and mountinfo.
        root: what the mount points are under.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cpu_quota(proc, root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(proc: Path = PROC, root: Path = Path("/")) -> float | None:
    """Cores that the smallest quota of all groups pays for; None without one, or where there are no control groups."""
    quotas = [quota for group in _groups(proc, root) if (quota := _quota(group)) is not None]
    return min(quotas, default=None)


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """Folders of the own group and of those above it, as far as they can be seen, of both versions."""
    try:
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
        mounts = [line.split(" ") for line in (proc / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for mount in mounts:
        # number parent device ROOT POINT options ... - TYPE source OPTIONS
        kind, options = mount[mount.index("-") + 1], mount[-1].split(",")
        if kind == "cgroup2":
            paths = [path for _, controllers, path in own if not controllers]
        elif kind == "cgroup" and "cpu" in options:
            paths = [path for _, controllers, path in own if "cpu" in controllers.split(",")]
        else:
            continue
        point = root / mount[4].lstrip("/")
        for path in paths:
            below = _below(PurePosixPath(path), PurePosixPath(mount[3]))
            yield from (point / each for each in (below, *below.parents))


def _below(path: PurePosixPath, mounted: PurePosixPath) -> PurePosixPath:
    """A group's path from the group that is mounted; of a container whose own group is mounted, that one."""
    try:
        return path.relative_to(mounted)
    except ValueError:  # of another namespace: "/../.." or the host's
        return PurePosixPath()


def _quota(group: Path) -> float | None:
    """The quota of one group, in cores."""
    given: list[str] = []
    with suppress(OSError):
        given = (group / "cpu.max").read_text().split()
    with suppress(OSError):
        given = [(group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
    try:
        quota, period = (int(each) for each in given)
    except ValueError:  # "max", or no files
        return None
    return quota / period if quota > 0 and period > 0 else None
