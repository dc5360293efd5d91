"""Two machines on one: a pair in two network namespaces with a relay of IP packets between them.

test ──veth──► prefill server  ns a ──tun── relay ──tun── ns b  decode server ◄──veth── test
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from headrace.server.launch.free_port import free_port
from tests.e2e import machines
from tests.faults.cells import Strike
from tests.faults.load import Texts
from tests.faults.pair import DECODE_MODEL, PREFILL_MODEL, SIZES, Pair, decode_flags, prefill_flags
from tests.faults.servers import Place, Supervised

OPEN = ("--host", "0.0.0.0", "--insecure", "--trusted-network")
ADDRESSES = ("198.18.98.1", "198.18.98.2")  # of the two servers for each other
OUTSIDE = ("198.18.95", "198.18.96")  # networks by which the test reaches them


class Network:
    """The relay between the two. Fates are those of tun_relay.Fate; prefill: of packets from the prefill server."""

    def __init__(self, namespaces: tuple[str, str]) -> None:
        ends = [word for pair in zip(namespaces, ADDRESSES, strict=True) for word in pair]
        self._relay = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.tun_relay", *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.set()

    def set(self, prefill: dict[str, float] | None = None, decode: dict[str, float] | None = None) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps({"a": prefill or {}, "b": decode or {}}) + "\n")
        self._relay.stdin.flush()
        assert self._relay.stdout.readline() == "changed\n"

    def slow(self, bytes_per_s: float) -> None:
        self.set({"bytes_per_s": bytes_per_s})

    def close(self) -> None:
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.close()
        self._relay.wait(10)
        self._relay.stdout.close()


def missing() -> str:
    """Why there can be no such network here; "" where there can."""
    if os.geteuid() or shutil.which("ip") is None:
        return "network namespaces need root and ip"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"hr{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, timeout=30).returncode:
        return "network namespaces are not allowed here"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=30)
    return ""


def weather(prefill: dict[str, float] | None, decode: dict[str, float] | None) -> Strike:
    """What happens to packets from each side, for as long as it lasts."""

    @contextmanager
    def strike(pair: Pair) -> Iterator[None]:
        assert isinstance(pair.network, Network)
        pair.network.set(prefill, decode)
        try:
            yield
        finally:
            pair.network.set()

    return strike


@contextmanager
def networked_pair() -> Iterator[Pair]:
    """The pair for the length of a with block."""
    machines.remove_leftovers()
    with ExitStack() as stack:
        names = tuple(f"hr{os.getpid()}-{side}" for side in "ab")
        for name, outside in zip(names, OUTSIDE, strict=True):
            _namespace(stack, name, outside)
        network = Network((names[0], names[1]))
        stack.callback(network.close)
        places = [
            Place(f"{outside}.2", ("ip", "netns", "exec", name)) for name, outside in zip(names, OUTSIDE, strict=True)
        ]
        ports = [free_port() for _ in range(4)]
        flags: tuple[str, ...] = ("--control-port", str(ports[1]), "--data-port", "38200", "--transfer-backends", "zmq")
        own: dict[str, Any] = {"place": places[0]}
        prefill = Supervised(
            "prefill", prefill_flags(PREFILL_MODEL, *flags, *OPEN, "--transfer-host", "0.0.0.0"), ports[:1], **own
        )
        stack.enter_context(closing(prefill))
        url = f"http://{ADDRESSES[0]}:{ports[0]}"
        decode = Supervised(
            "decode", decode_flags(DECODE_MODEL, url, *OPEN, "--transfer-backends", "zmq"), ports[3:], places[1]
        )
        stack.enter_context(closing(decode))
        pair = Pair(prefill, decode, {}, Texts(SIZES), network, ADDRESSES[0])
        try:
            pair.settled()
            yield pair
        finally:
            print(prefill.story, decode.story, sep="\n=== decode server ===\n")


def _namespace(stack: ExitStack, name: str, outside: str) -> None:
    """A namespace with a cable to the test."""
    _ip(f"netns add {name}")
    stack.callback(_ip, f"netns del {name}")
    _ip(f"link add {name} type veth peer name eth0 netns {name}")
    stack.callback(_ip, f"link del {name}")
    _ip(f"addr add {outside}.1/24 dev {name}")
    _ip(f"link set {name} up")
    _ip(f"-n {name} addr add {outside}.2/24 dev eth0")
    for device in ("lo", "eth0"):
        _ip(f"-n {name} link set {device} up")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True, timeout=30)
