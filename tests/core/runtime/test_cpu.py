"""Cores that a process may use: quotas of made-up control groups of both versions, and of a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.runtime.cpu import cpu_quota, usable_cores
from tests.deployment.files import PACKAGES, ROOT

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 {root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


class Machine:
    """Files as the kernel shows them to a process."""

    def __init__(self, folder: Path, cgroup: str, mountinfo: str) -> None:
        self.root, self.proc = folder / "root", folder / "proc"
        self.proc.mkdir()
        (self.proc / "cgroup").write_text(cgroup)
        (self.proc / "mountinfo").write_text("21 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo)

    def write(self, path: str, content: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content + "\n")

    def quota(self) -> float | None:
        return cpu_quota(self.proc, self.root)


def test_the_smallest_quota_of_the_own_group_and_those_above_it(tmp_path: Path) -> None:
    """systemd's, or a pod below its class."""
    machine = Machine(tmp_path, "0::/kubepods/burstable/pod1/c1\n", V2.format(root="/"))
    assert machine.quota() is None
    machine.write("/sys/fs/cgroup/kubepods/burstable/pod1/c1/cpu.max", "max 100000")
    machine.write("/sys/fs/cgroup/kubepods/burstable/pod1/cpu.max", "350000 100000")
    machine.write("/sys/fs/cgroup/kubepods/cpu.max", "800000 100000")
    machine.write("/sys/fs/cgroup/kubepods/burstable/pod2/cpu.max", "1000 100000")
    assert machine.quota() == 3.5
    machine.write("/sys/fs/cgroup/kubepods/burstable/pod1/c1/cpu.max", "25000 50000")
    assert machine.quota() == 0.5


@pytest.mark.parametrize(
    ("path", "mounted"),
    [("/", "/"), ("/docker/c1", "/docker/c1"), ("/docker/c1", "/"), ("/../../other", "/")],
    ids=["own namespace", "own group mounted", "no namespace", "joined from another"],
)
def test_a_container_that_sees_its_own_group_as_the_root(path: str, mounted: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, f"0::{path}\n", V2.format(root=mounted))
    machine.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert machine.quota() == 2.0


@pytest.mark.parametrize(("path", "mounted", "below"), [("/a/b", "/", "/a/b"), ("/docker/c1", "/docker/c1", "")])
def test_version_1(path: str, mounted: str, below: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, f"4:cpuset:/\n3:cpu,cpuacct:{path}\n0::/x\n", V1.format(root=mounted))
    group = f"/sys/fs/cgroup/cpu,cpuacct{below}"
    machine.write(f"{group}/cpu.cfs_period_us", "100000")
    machine.write(f"{group}/cpu.cfs_quota_us", "-1")
    assert machine.quota() is None
    machine.write(f"{group}/cpu.cfs_quota_us", "150000")
    assert machine.quota() == 1.5


@pytest.mark.parametrize(("quota", "cores"), [("5000", 1), ("100000", 1), ("199999", 1), ("200000", 2), ("900000", 3)])
def test_quotas_are_rounded_down_and_affinity_holds(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 5})
    machine = Machine(tmp_path, "0::/\n", V2.format(root="/"))
    assert usable_cores(machine.proc, machine.root) == 3
    machine.write("/sys/fs/cgroup/cpu.max", f"{quota} 100000")
    assert usable_cores(machine.proc, machine.root) == cores


@pytest.mark.parametrize("content", ["", "max", "a b", "1 0", "-5 100000"])
def test_files_that_say_nothing_set_no_quota(content: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n", V2.format(root="/"))
    machine.write("/sys/fs/cgroup/cpu.max", content)
    assert usable_cores(machine.proc, machine.root) == len(os.sched_getaffinity(0))


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "nothing", tmp_path) is None


def test_a_real_group() -> None:
    """As root, where groups can be made. On a machine with one core it says nothing."""
    places = (("/sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "100000"), ("/sys/fs/cgroup", "cpu.max", "100000 100000"))
    for place, name, content in places:
        group = Path(place) / f"headrace-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(content)
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        code = f"""
import os
open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from headrace.core.runtime.cpu import cpu_quota, usable_cores
print(cpu_quota(), usable_cores())
"""
        try:
            assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1.0 1\n"
        finally:
            group.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_cores_are_counted_in_one_place() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*.py")
        for text in (path.read_text(encoding="utf-8"),)
        if "sched_getaffinity" in text or "cpu_count" in text
    }
    assert found == {"core/runtime/cpu.py"}
