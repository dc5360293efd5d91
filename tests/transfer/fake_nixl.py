"""A double of NIXL's agents that knows GPUs, and checks what it is told: kind of memory, device and range of pieces.

The memory of a GPU stands in host memory, at addresses that are ADDED to those that the program is given. It is not
mapped there: a program that reads or writes it by itself is killed.
"""

import ctypes
import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from headrace.transfer.backends import base as nixl_neighbour
from headrace.transfer.backends.device_memory import DeviceMemory

MODULE = Path(nixl_neighbour.__file__).with_name("nixl.py")

ADDED = 1 << 52


def on_gpu(memory: np.ndarray, device: int) -> DeviceMemory:
    """This memory as that of a GPU."""
    return DeviceMemory(memory.ctypes.data + ADDED, memory.nbytes, device)


class Error(Exception):
    """Any of NIXL's."""


class Registered(NamedTuple):
    kind: str
    address: int
    size: int
    device: int

    def holds(self, kind: str, address: int, size: int, device: int) -> bool:
        inside = self.address <= address and address + size <= self.address + self.size
        return inside and (kind, device) == (self.kind, self.device)


class Pieces(NamedTuple):
    """A nixlRegDList or nixlXferDList."""

    kind: str
    rows: list[tuple[int, int, int]]


class Agent:
    """A nixlAgent. A write lands when its status is asked for the second time."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network, self.name = network, name
        self.regions: list[Registered] = []
        self.options = ""
        self.requests: dict[int, tuple[Pieces, Pieces, str]] = {}
        self.asked: set[int] = set()
        network.agents[name] = self

    def createBackend(self, kind: str, options: dict[str, str]) -> str:
        assert kind == "UCX"
        self.options = options["engine_config"]
        return kind

    def registerMem(self, regions: Pieces, _: list[str]) -> None:
        for address, size, device in regions.rows:
            if (address >= ADDED) != (regions.kind == "VRAM"):
                raise Error(f"{address:x} is no {regions.kind}")
            self.regions.append(Registered(regions.kind, address, size, device))

    def deregisterMem(self, _: Pieces, __: list[str]) -> None:
        self.regions.clear()

    def getLocalMD(self) -> bytes:
        return self.name.encode()

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        return metadata

    def invalidateRemoteMD(self, _: str) -> None:
        pass

    def createXferReq(self, operation: str, here: Pieces, there: Pieces, peer: str) -> int:
        assert operation == "write"
        for agent, pieces in ((self, here), (self.network.agents[peer], there)):
            for address, size, device in pieces.rows:
                if not any(region.holds(pieces.kind, address, size, device) for region in agent.regions):
                    raise Error(f"{pieces.kind} {device} at {address:x} is not registered")
        assert [size for _, size, _ in here.rows] == [size for _, size, _ in there.rows]
        self.requests[len(self.requests) + 1] = here, there, peer
        return len(self.requests)

    def postXferReq(self, request: int) -> None:
        here, there, _ = self.requests[request]
        self.network.written[here.kind, there.kind] += sum(size for _, size, _ in here.rows)

    def getXferStatus(self, request: int) -> str:
        if request not in self.asked:
            self.asked.add(request)
            return "in progress"
        here, there, _ = self.requests[request]
        for (source, size, _), (target, _, _) in zip(here.rows, there.rows, strict=True):
            ctypes.memmove(_real(there.kind, target), _real(here.kind, source), size)
        return "success"

    def releaseXferReq(self, _: int) -> None:
        pass


def _real(kind: str, address: int) -> int:
    return address - ADDED if kind == "VRAM" else address


class Network:
    """All agents, and NIXL's module over them."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.written = dict.fromkeys(product(("DRAM", "VRAM"), repeat=2), 0)
        """Bytes by kinds of memory, from and to."""

    def module(self) -> Any:
        """transfer/backends/nixl.py over these agents."""
        bindings: Any = ModuleType("nixl._bindings")
        errors = "Backend Cancelled InvalidParam Mismatch NotAllowed NotFound NotPosted NotSupported RemoteDisconnect"
        for name in (*errors.split(), "RepostActive", "Unknown"):
            setattr(bindings, f"nixl{name}Error", Error)
        bindings.DRAM_SEG, bindings.VRAM_SEG = "DRAM", "VRAM"
        bindings.NIXL_WRITE, bindings.NIXL_SUCCESS, bindings.NIXL_IN_PROG = "write", "success", "in progress"
        bindings.nixlAgentConfig = lambda: ModuleType("config")
        bindings.nixlAgent = lambda name, _: Agent(self, name)
        bindings.nixlRegDList = lambda kind, rows: Pieces(kind, [row[:3] for row in rows])
        bindings.nixlXferDList = lambda kind, rows: Pieces(kind, [tuple(map(int, row)) for row in rows])
        package: Any = ModuleType("nixl")
        package._bindings = bindings
        spec = importlib.util.spec_from_file_location("nixl_over_doubles", MODULE)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        with patch.dict(sys.modules, {"nixl": package, "nixl._bindings": bindings}):
            spec.loader.exec_module(made)
        return made
