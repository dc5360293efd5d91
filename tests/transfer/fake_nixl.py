"""A double of NIXL's agents that knows GPUs, and checks what it is told: kind of memory, device and range of pieces.

The memory of a GPU stands in host memory, at addresses that are ADDED to those that the program is given. It is not
mapped there: a program that reads or writes it by itself is killed.
"""

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A nixlAgent. What it writes or reads is there when its status is asked for the second time."""

    def __init__(self, network: "Network", name: str) -> None:
        self.network, self.name = network, name
        self.regions: list[Registered] = []
        self.options = ""
        self.requests: dict[int, tuple[str, Pieces, Pieces, str]] = {}
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
        if peer not in self.network.agents:
            raise Error(f"{peer} is gone")
        for agent, pieces in ((self, here), (self.network.agents[peer], there)):
            for address, size, device in pieces.rows:
                if not any(region.holds(pieces.kind, address, size, device) for region in agent.regions):
                    raise Error(f"{pieces.kind} {device} at {address:x} is not registered")
        assert [size for _, size, _ in here.rows] == [size for _, size, _ in there.rows]
        self.requests[len(self.requests) + 1] = operation, here, there, peer
        return len(self.requests)

    def postXferReq(self, request: int) -> None:
        operation, here, there, _ = self.requests[request]
        if operation == "write":
            self.network.written[here.kind, there.kind] += sum(size for _, size, _ in here.rows)

    def getXferStatus(self, request: int) -> str:
        if request not in self.asked:
            self.asked.add(request)
            return "in progress"
        operation, here, there, _ = self.requests[request]
        source, target = (here, there) if operation == "write" else (there, here)
        for (at, size, _), (to, _, _) in zip(source.rows, target.rows, strict=True):
            ctypes.memmove(_real(target.kind, to), _real(source.kind, at), size)
        return "success"

    def releaseXferReq(self, _: int) -> None:
        pass

    def getNotifs(self, *_: object) -> dict[str, list[bytes]]:
        return {}


def _real(kind: str, address: int) -> int:
    return address - ADDED if kind == "VRAM" else address


class Network:
    """All agents, and NIXL's module over them."""

    def __init__(self) -> None:
        self.agents: dict[str, Agent] = {}
        self.written = dict.fromkeys(product(("DRAM", "VRAM"), repeat=2), 0)
        """Bytes by kinds of memory, from and to."""

    @contextmanager
    def imported(self, *names: str) -> Iterator[list[Any]]:
        """Modules that import transfer/backends/nixl.py, over these agents."""
        with patch.dict(sys.modules, {f"{nixl_neighbour.__package__}.nixl": self.module()}):
            for name in names:
                sys.modules.pop(name, None)
            yield [importlib.import_module(name) for name in names]

    def module(self) -> Any:
        """transfer/backends/nixl.py over these agents."""
        bindings: Any = ModuleType("nixl._bindings")
        errors = "Backend Cancelled InvalidParam Mismatch NotAllowed NotFound NotPosted NotSupported RemoteDisconnect"
        for name in (*errors.split(), "RepostActive", "Unknown"):
            setattr(bindings, f"nixl{name}Error", Error)
        bindings.DRAM_SEG, bindings.VRAM_SEG = "DRAM", "VRAM"
        bindings.NIXL_WRITE, bindings.NIXL_READ = "write", "read"
        bindings.NIXL_SUCCESS, bindings.NIXL_IN_PROG = "success", "in progress"
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
