"""Control groups of Linux, version 1 or 2: processes of servers are frozen, short of memory, or may not fork."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.cells import Strike
from tests.faults.pair import Pair
from tests.faults.processes import found

ROOT = Path("/sys/fs/cgroup")
KILLED_WITHIN_S = 20.0
FORKS = 20.0  # seconds to wait until a group is empty


def missing(controller: str) -> str:
    """Why control groups of this kind cannot be used here; "" where they can."""
    try:
        with _group(controller) as folder:
            return "" if folder.is_dir() else f"no control group for {controller}"
    except OSError as error:
        return f"control groups for {controller} cannot be used: {error}"


def frozen(*places: str) -> Strike:
    """The processes stop without a signal and without anything that their parents can see."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        with _group("freezer") as folder:
            _move(found(pair, places), folder)
            _write(folder, ("freezer.state", "cgroup.freeze"), ("FROZEN", "1"))
            try:
                yield
            finally:
                _write(folder, ("freezer.state", "cgroup.freeze"), ("THAWED", "0"))

    return strike


def out_of_memory(place: str) -> Strike:
    """The process gets no page more: the kernel kills it at its next allocation."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        with _group("memory") as folder:
            _write(folder, ("memory.limit_in_bytes", "memory.max"), ("0", "0"))
            processes = found(pair, (place,))
            _move(processes, folder)
            yield
            _, alive = psutil.wait_procs(processes, timeout=KILLED_WITHIN_S)
            assert not alive, "the kernel has killed it"

    return strike


def no_forks(place: str, victim: str) -> Strike:
    """The process can start nothing, neither process nor thread, when the victim is killed."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        with _group("pids") as folder:
            _move(found(pair, (place,)), folder)
            (folder / "pids.max").write_text("1")  # there are more already
            for process in found(pair, (victim,)):
                process.kill()
            try:
                yield
            finally:
                (folder / "pids.max").write_text("max")

    return strike


@contextmanager
def _group(controller: str) -> Iterator[Path]:
    """A new group, removed afterwards; processes that are still in it go back to the root."""
    root = ROOT if _unified() else ROOT / controller
    folder = root / f"headrace-faults-{os.getpid()}"
    if _unified() and controller != "freezer":
        (root / "cgroup.subtree_control").write_text(f"+{controller}")
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        deadline = time.monotonic() + FORKS
        while folder.is_dir() and time.monotonic() < deadline:
            for pid in (folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (root / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                folder.rmdir()
            time.sleep(0.02)


def _unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def _move(processes: Sequence[psutil.Process], folder: Path) -> None:
    for process in processes:
        with suppress(OSError):
            (folder / "cgroup.procs").write_text(str(process.pid))


def _write(folder: Path, names: tuple[str, str], values: tuple[str, str]) -> None:
    """A value to the file of version 1, or to that of version 2."""
    version = int(_unified())
    (folder / names[version]).write_text(values[version])
