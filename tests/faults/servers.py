"""Servers under faults: ports that stay, folders of their own, and a service manager that starts them again."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from headrace.core.runtime.process import module_command
from headrace.scheduler.recording.file import SUFFIX
from headrace.server.launch.local_server import KEY_VARIABLES
from tests.e2e.harness import Server
from tests.e2e.strikes import ranks_of
from tests.scheduler.recordings import FOLDER

SHARED_MEMORY = Path("/dev/shm")
WATCH_S = 0.2  # between looks at the process, and before it is started again
PROCESSES = ("front end", "scheduler", "stage 0", "stage 1")


@dataclass(frozen=True)
class Place:
    """Where a server runs. prefix: of its command. address: where its HTTP port is reached from here."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Supervised(Server):
    """A server that a service manager looks after: ports stay the same over its lives."""

    def __init__(self, name: str, flags: Sequence[str], ports: Sequence[int], place: Place | None = None) -> None:
        """ports: of HTTP first, then those that it binds besides."""
        self.name = name
        self.ports = tuple(ports)
        self.port = ports[0]
        self.place = place or Place()
        self.url = f"http://{self.place.address}:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"hr-{name}-"))
        self.recordings = Path(tempfile.mkdtemp(prefix=f"hr-recordings-{name}-"))
        self.lives = 0
        self.statuses: list[int] = []
        """Exit statuses of lives that ended by themselves."""
        self._flags = (*flags, "--record", str(self.recordings), "--record-tokens")
        self._past: dict[int, psutil.Process] = {}
        self._pools: set[str] = set()  # files in shared memory that its processes were seen to have mapped
        self._logs: list[str] = []
        self._children: list[psutil.Process] = []
        self.begin()

    def begin(self) -> None:
        """Start the process."""
        self.lives += 1
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = module_command("headrace.cli.commands", "serve", "--port", str(self.port), *self._flags)
        clean = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
        self.process = subprocess.Popen(
            [*self.place.prefix, *command],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**clean, "TMPDIR": str(self.folder), **self.place.environment},
        )

    def named(self, what: str) -> psutil.Process:
        """Its process of this name, one of PROCESSES."""
        if what == "front end":
            return psutil.Process(self.process.pid)
        if what == "scheduler":
            return self.child("headrace.server.launch.scheduler_process")
        return ranks_of(self)[int(what.removeprefix("stage "))]

    def processes(self) -> list[psutil.Process]:
        """All of its processes that run now."""
        with suppress(psutil.NoSuchProcess):
            found = [psutil.Process(self.process.pid), *self.children()]
            self._past.update((process.pid, process) for process in found)
            self._pools.update(*(pools_of(process.pid) for process in found))
            return found
        return []

    def abandoned(self) -> list[str]:
        """Pools of its own that are in shared memory, and that no process has mapped any more."""
        there = [name for name in sorted(self._pools) if (SHARED_MEMORY / name).exists()]
        mapped = set().union(*(pools_of(pid) for pid in psutil.pids())) if there else set()
        return [name for name in there if name not in mapped]

    def add_flags(self, *flags: str) -> None:
        """For its later lives."""
        self._flags = (*self._flags, *flags)

    def revive(self) -> bool:
        """Start it again if it has ended. Returns whether it had."""
        if self.process.poll() is None:
            return False
        self.statuses.append(self.process.returncode)
        self._logs.append(self.log)
        self._output.close()
        self.begin()
        return True

    @property
    def story(self) -> str:
        """The logs of all its lives."""
        return "\n--- started again ---\n".join([*self._logs, self.log])

    def orphans(self) -> list[psutil.Process]:
        """Processes of earlier lives and groups that still run."""
        now = {process.pid for process in self.processes()}
        return [process for pid, process in self._past.items() if pid not in now and _runs(process)]

    def temporary(self) -> list[str]:
        """What lies in its temporary folder."""
        return sorted(path.name for path in self.folder.iterdir())

    def bound(self) -> list[int]:
        """Those of its ports at which something listens."""
        return [port for port in self.ports if _listens(self.place.address, port)]

    def close(self) -> None:
        """Kill what is left of it and remove its folder."""
        for process in [*self.processes(), *self.orphans()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        super().close()
        with suppress(OSError):
            subprocess.run(["rm", "-rf", str(self.folder), str(self.recordings)], check=False, timeout=30)

    def keep_recordings(self, name: str) -> list[Path]:
        """What it has recorded, with what it has now if it still answers, in the folder of recordings of failed
        tests."""
        with suppress(httpx.HTTPError):
            self.post("/debug/record", {})
        FOLDER.mkdir(exist_ok=True)
        kept = [(each, FOLDER / f"{name}-{self.name}-{each.name}") for each in self.recordings.glob(f"*{SUFFIX}")]
        return [shutil.copy(each, path) for each, path in kept]


class Manager:
    """Starts servers again that end, for the length of a with block, as systemd or Kubernetes would."""

    def __init__(self, *servers: Supervised) -> None:
        self._servers = servers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Manager":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            for server in self._servers:
                server.revive()


def pools_of(process: int) -> set[str]:
    """Names of the KV pools in shared memory that a process has mapped."""
    with suppress(OSError):
        maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
        return set(re.findall(rf"{SHARED_MEMORY}/(headrace-kv-\S+)", maps))
    return set()


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0
