"""Several machines on one: network namespaces on a bridge where that is allowed, else loopback addresses.

The scheduler's server runs where the test does; the machines are for stages.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

import psutil

from headrace.server.launch.free_port import free_port

SUBNET = "198.18.97"  # of a range that is set aside for tests of networks


@dataclass(frozen=True)
class Machine:
    """prefix: what runs a command there. gateway: the server's address as seen from there."""

    address: str
    gateway: str
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """Machines for the length of a with block."""
    with ExitStack() as stack:
        if not _bridge(stack):
            yield [Machine(f"127.0.0.{2 + number}", "127.0.0.1") for number in range(count)]
            return
        yield [_namespace(stack, number) for number in range(count)]


def _bridge(stack: ExitStack) -> bool:
    """Whether there may be namespaces; then there is a bridge for them."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    remove_leftovers()
    if not _ip(f"link add {_name()} type bridge", check=False):
        return False
    stack.callback(_ip, f"link del {_name()}")
    if not _ip(f"netns add {_name()}", check=False):
        return False
    _ip(f"netns del {_name()}")
    _ip(f"addr add {SUBNET}.1/24 dev {_name()}")
    return _ip(f"link set {_name()} up")


def remove_leftovers() -> None:
    """Remove namespaces and devices of test processes that were killed: their bridges have the same addresses."""
    for what, pattern in (("netns", r"^hr(\d+)\S*"), ("link", r"^\d+: hr(\d+)[^:@]*")):
        listed = subprocess.run(["ip", "-o", what, "list"], capture_output=True, text=True, timeout=30).stdout
        for match in re.finditer(pattern, listed, re.MULTILINE):
            if not psutil.pid_exists(int(match[1])):
                _ip(f"{what} del {match[0].split()[-1]}", check=False)


def _namespace(stack: ExitStack, number: int) -> Machine:
    name, address = f"{_name()}-{number}", f"{SUBNET}.{2 + number}"
    _ip(f"netns add {name}")
    stack.callback(_ip, f"netns del {name}")
    _ip(f"link add {name} type veth peer name eth0 netns {name}")
    stack.callback(_ip, f"link del {name}")  # a namespace takes its devices with it, but only some time later
    _ip(f"link set {name} master {_name()} up")
    _ip(f"-n {name} addr add {address}/24 dev eth0")
    for device in ("lo", "eth0"):
        _ip(f"-n {name} link set {device} up")
    prefix = ("ip", "netns", "exec", name)
    return Machine(address, f"{SUBNET}.1", prefix, {"GLOO_SOCKET_IFNAME": "eth0"})


def _name() -> str:
    return f"hr{os.getpid()}"


def _ip(arguments: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, timeout=30)
    assert not check or done.returncode == 0, f"ip {arguments}: {done.stderr}"
    return done.returncode == 0


class Tree:
    """A process of a machine and its descendants."""

    def __init__(self, machine: Machine, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [*machine.prefix, sys.executable, "-m", *command],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **machine.environment, **(environment or {})},
        )

    @property
    def log(self) -> str:
        return os.pread(self._output.fileno(), 1 << 20, 0).decode(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """The root first."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def signal(self, number: int) -> None:
        """To every process of it, the root first."""
        with suppress(psutil.NoSuchProcess):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def ended(self, timeout_s: float) -> int:
        """Its exit status, which has to come in this time."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(10)
        self._output.close()


class Stages:
    """Starts the stages of a server, one on each machine."""

    def __init__(self, where: Sequence[Machine], port: int) -> None:
        self._where = where
        self._port = port
        self._master = f"{where[0].address}:{free_port()}"
        self._trees: list[Tree] = []

    def start(self, rank: int, *flags: str, environment: Mapping[str, str] | None = None) -> Tree:
        """`headrace stage`, by hand. flags: in the place of what is said here, or besides."""
        machine = self._where[rank]
        place = ["--rank", str(rank), "--world-size", str(len(self._where)), "--master", self._master]
        own = ["--transfer-host", machine.address]
        command = ["headrace.cli.commands", "stage", "--scheduler", self.scheduler(rank), *place, *own, *flags]
        return self.run(rank, command, environment)

    def start_all(self) -> list[Tree]:
        return [self.start(rank) for rank in range(len(self._where))]

    def run(self, rank: int, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Tree:
        """Any module on the machine of a stage."""
        tree = Tree(self._where[rank], command, environment)
        self._trees.append(tree)
        return tree

    def scheduler(self, rank: int) -> str:
        """Where a stage joins."""
        return f"tcp://{self._where[rank].gateway}:{self._port}"

    def close(self) -> None:
        """Kill what is left, and show what it has said: pytest prints it when the test fails."""
        for tree in self._trees:
            print(tree.log)
            tree.close()
