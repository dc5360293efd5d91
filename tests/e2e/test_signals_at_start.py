"""Signals while a server starts: it ends at once, with the right status, and nothing is left of it."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from headrace.core.runtime.process import module_command
from headrace.server.launch.free_port import free_port
from tests.e2e.harness import wait_until
from tests.faults.servers import SHARED_MEMORY, pools_of

END_S = 30.0  # at ten times the load; a stage that loads would take minutes
STUB = ("--model", "stub:layers=4,vocab=1000", "--dtype", "float32", "--threads", "1")
# After the start of the process, in seconds: while it imports, while its children do, while they load, and later.
MOMENTS = (0.05, 0.3, 0.6, 0.9, 1.2, 1.5, 1.8, 2.2, 2.6, 3.0, 3.5, 4.0, 5.0, 7.0)


class Starting:
    """A server in a session of its own, as a shell makes one for a command in a terminal."""

    def __init__(self, folder: str, log: Path) -> None:
        flags = ("--role", "decode", "--fallback", "local", "--port", str(free_port()), *STUB)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                module_command("headrace.cli.main", "serve", *flags),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": folder},
                start_new_session=True,
            )
        self.log = log
        self._children: dict[int, psutil.Process] = {}
        self._pools: set[str] = set()

    def children(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._children[child.pid] = child
                self._pools |= pools_of(child.pid)
        return list(self._children.values())

    def left(self) -> list[str]:
        """Pools of its own that are in shared memory."""
        return [name for name in self._pools if (SHARED_MEMORY / name).exists()]

    def interrupt(self) -> None:
        """Ctrl-C in the terminal."""
        self.children()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self, everything: bool) -> None:
        """everything: as systemd does, else as Kubernetes does."""
        for process in [*(self.children() if everything else ()), psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Its exit status."""
        self.children()
        status = self.process.wait(END_S)
        _, alive = psutil.wait_procs(self.children(), timeout=10)
        assert not alive
        return status


@contextmanager
def starting() -> Iterator[Starting]:
    """A server that was just started; nothing is left of it afterwards."""
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile(suffix=".log") as log:
        server = Starting(folder, Path(log.name))
        try:
            yield server
            said = server.log.read_text()
            if "Traceback" in said:  # of the interpreter alone, which is interrupted before the first line of ours
                assert not re.search(r'File "(?!<frozen )', said), said
            assert os.listdir(folder) == []
            assert not server.left()
        finally:
            print(server.log.read_text())
            for process in [*server.children(), server.process]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def loading(server: Starting) -> bool:
    """Its stage runs."""
    for child in server.children():
        with suppress(psutil.NoSuchProcess):
            if "headrace.engine.stage" in child.cmdline():
                return True
    return False


def test_a_second_signal_while_the_stages_load() -> None:
    with starting() as server:
        wait_until(lambda: loading(server), 60, "the stage loads")
        server.interrupt()
        wait_until(lambda: "draining" in server.log.read_text() or server.process.poll() is not None, 60, "it drains")
        server.interrupt()
        assert server.ended() in (0, 128 + signal.SIGINT), "0: it had drained, having nothing to do"


@pytest.mark.full
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kind", ["ctrl-c", "kubernetes", "systemd"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_signals_at_any_moment(moment: float, kind: str, again: bool) -> None:
    """Before the command line is read there is nothing to end in order: the signal itself does it, or main()."""
    number = signal.SIGINT if kind == "ctrl-c" else signal.SIGTERM
    with starting() as server:
        for pause_s in (moment, 0.2) if again else (moment,):
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(pause_s)
            if server.process.poll() is None:
                server.interrupt() if kind == "ctrl-c" else server.terminate(kind == "systemd")
        assert server.ended() in (0, -number, 128 + number)
