"""A relay of IP packets between two network namespaces: loses, delays, reorders, doubles and damages them.

    python -m tests.faults.tun_relay NAMESPACE ADDRESS NAMESPACE ADDRESS

    namespace a   tun0 ──────► this process ──────► tun0   namespace b
                       ◄──────              ◄──────

Standard input has a line of JSON for every change: {"a": {...}, "b": {...}}, what happens to packets from a, and from b
(see Fate). It ends with its input. The TCP of the two namespaces mends what it does, as on a real network.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 2048
QUEUE_S = 0.2  # of a link with a rate: what would wait longer is dropped, as by a router
IDLE_S = 1.0


@dataclass
class Fate:
    """Of packets from one side."""

    loss: float = 0.0
    """Share of packets that vanish; 1: a partition."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Longest additional delay of each packet by itself: they overtake each other."""
    double: float = 0.0
    damage: float = 0.0
    """Share of packets with a flipped bit, which checksums of TCP and IP find."""
    bytes_per_s: float = 0.0
    """0: any number."""


class Side:
    """One end of the relay. free_at: when its line has sent what it has taken."""

    def __init__(self, namespace: str, address: str) -> None:
        self.fate = Fate()
        self.device = _open_tun(namespace)
        self._free_at = 0.0
        for command in (f"addr add {address}/24 dev tun0", "link set tun0 up"):
            subprocess.run(["ip", "-n", namespace, *command.split()], check=True)

    def times(self, size: int, now: float) -> list[float]:
        """When a packet from here arrives: never, once or twice."""
        fate = self.fate
        if random.random() < fate.loss:
            return []
        sent = now
        if fate.bytes_per_s:
            if self._free_at - now > QUEUE_S:
                return []
            sent = self._free_at = max(self._free_at, now) + size / fate.bytes_per_s
        copies = 2 if random.random() < fate.double else 1
        return [sent + fate.delay_s + random.uniform(0, fate.jitter_s) for _ in range(copies)]


def run(sides: tuple[Side, Side]) -> None:
    """Relay until standard input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []
    numbers = itertools.count()
    ends = [side.device for side in sides]
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else IDLE_S
        ready = select.select([sys.stdin, *ends], [], [], timeout)[0]
        now = time.monotonic()
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            for side, name in zip(sides, "ab", strict=True):
                side.fate = Fate(**json.loads(line)[name])
            print("changed", flush=True)
        for index, side in enumerate(sides):
            if side.device in ready:
                packet = os.read(side.device, PACKET_BYTES)
                for at in side.times(len(packet), now):
                    heapq.heappush(waiting, (at, next(numbers), ends[1 - index], _damaged(packet, side.fate)))
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # EINVAL where its damage is in the version of IP
                os.write(device, packet)


def _damaged(packet: bytes, fate: Fate) -> bytes:
    if random.random() >= fate.damage:
        return packet
    changed = bytearray(packet)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _open_tun(namespace: str) -> int:
    """A new device tun0 in a namespace; this process stays where it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", b"tun0", IFF_TUN | IFF_NO_PI))
        return device
    finally:
        libc.setns(home, CLONE_NEWNET)
        os.close(home)
        os.close(there)


if __name__ == "__main__":
    run((Side(*sys.argv[1:3]), Side(*sys.argv[3:5])))
