"""Full disks: servers have small file systems of their own, in mount namespaces, which are filled up and emptied."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.faults.cells import Strike
from tests.faults.pair import Pair, relayed_pair
from tests.faults.processes import found
from tests.faults.servers import Place, Supervised

SMALL = {"cache": "4m", "kv": "24m", "log": "1m", "tmp": "4m"}
FILLER = "filler"


def missing() -> str:
    """Why there can be no small file systems here; "" where they can be."""
    if os.geteuid() or shutil.which("unshare") is None:
        return "mount namespaces need root and unshare"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"], capture_output=True, timeout=30
    )
    return "" if done.returncode == 0 else "tmpfs cannot be mounted here"


@contextmanager
def confined_pair() -> Iterator[Pair]:
    """A pair whose folders for caches, KV, logs and temporary files, and /dev/shm, are small. KV goes by shared
    memory."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-disks-")))
        for name in SMALL:
            (folder / name).mkdir()
        mounts = [f"mount -t tmpfs -o size={size} tmpfs {folder}/{name}" for name, size in SMALL.items()]
        # One /dev/shm for both would need one namespace; each has its own, so KV goes by ZMQ.
        mounts.append("mount -t tmpfs -o size=64m tmpfs /dev/shm")
        script = f'{" && ".join(mounts)} && exec "$@" >> {folder}/log/output 2>&1'
        prefix = ("unshare", "-m", "sh", "-c", script, "sh")
        place = Place(prefix=prefix, environment={"TMPDIR": f"{folder}/tmp"})
        tiers = ("--disk-path", f"{folder}/kv", "--disk-gib", "1", "--disk-admission-turn", "0")
        cache = ("--cache-dir", f"{folder}/cache")
        made = relayed_pair((*cache, *tiers), cache, (place, place), backends="shm,zmq")
        yield stack.enter_context(made)


def full(side: str, name: str, victim: str = "") -> Strike:
    """A folder of a server has no byte left; "shm": its /dev/shm. victim: a process of it is killed meanwhile."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        server = {"prefill": pair.prefill, "decode": pair.decode}[side]
        filler = folder_of(server, name) / FILLER
        _fill(filler)
        _kill(found(pair, (victim,)) if victim else ())
        try:
            yield
        finally:
            with suppress(OSError):
                filler.unlink()

    return strike


def folder_of(server: Supervised, name: str) -> Path:
    """A folder as the server sees it, from here."""
    inside = Path("/dev/shm") if name == "shm" else Path(server.place.environment["TMPDIR"]).parent / name
    return Path(f"/proc/{server.process.pid}/root{inside}")


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    filler.write(bytes(size))


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        process.kill()
