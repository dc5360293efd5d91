"""NIXL backend: one-sided writes into the peer's registered pool by UCX, over RDMA where available, else TCP.

    owner (decode stage)                                      writer (prefill stage)
    session begins: an agent of its own, the pool             one agent for all peers, the own pool
    registered with it ─► its metadata in Attach ───────────► load it, write … until done, announce
    session over: that agent is destroyed, and with it        forget the peer
    the memory's key and the endpoint that would execute writes

Either pool may be in the memory of a GPU, which the network card reads or writes by itself where it can (GPUDirect),
else UCX by way of the host. What is written there has no checksum.

So the owner takes the right to write back by itself, whatever the writer does, even if it is stopped in the middle of
a write and goes on later. That holds for transports where a write needs the owner's network card or its own process
(RDMA, TCP). Where the writer's process itself writes into the owner's memory (UCX's cma, xpmem, knem, cuda_ipc) it does
not, so those are switched off: on one host there are backends/shm.py and cuda_ipc.py.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import asdict
from nixl import _bindings as nixl

from headrace.core.types.kv.backends import NixlAccess, NixlMemory, Placement, PoolLayout, PoolMemory
from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.backends.base import RemotePages
from headrace.transfer.backends.device_memory import DeviceMemory
from headrace.transfer.backends.strided_pool import Offsets, c_order, check_slots, page_numbers, placed, runs
from headrace.transfer.protocol.layout import WHOLE, Box, Bytes
from headrace.transfer.protocol.page_store import Completed, SourcePages

VERSION = "1.5"  # of the agents' metadata; agents of one minor version are compatible
PROGRESS_US = 10_000  # longest sleep of an agent's progress thread
UCX_OPTIONS = ("SHM_DEVICES=", "TLS=^cuda_ipc")  # no transports between processes of one host
HOST = -1  # device of host memory
LOOPBACK = "lo"
ERRORS = (
    nixl.nixlBackendError,
    nixl.nixlCancelledError,
    nixl.nixlInvalidParamError,
    nixl.nixlMismatchError,
    nixl.nixlNotAllowedError,
    nixl.nixlNotFoundError,
    nixl.nixlNotPostedError,
    nixl.nixlNotSupportedError,
    nixl.nixlRemoteDisconnectError,
    nixl.nixlRepostActiveError,
    nixl.nixlUnknownError,
)


class Agent:
    """A NIXL agent with registered memory.

    devices: network device that UCX may use, "" for all. same_host: whether processes of this host may also copy out
    of the memory and into it directly, which no destroy() keeps them from. Raises OSError if UCX has no transport
    there, or cannot register the memory.
    """

    def __init__(self, memory: memoryview | DeviceMemory, devices: str, *, same_host: bool = False) -> None:
        self.name = secrets.token_hex(16)
        self.device = memory.device if isinstance(memory, DeviceMemory) else HOST
        self._memory = memory.array() if isinstance(memory, DeviceMemory) else np.frombuffer(memory, np.uint8)
        self.address = int(self._memory.ctypes.data)
        options = [] if same_host else [*UCX_OPTIONS]
        options += [f"NET_DEVICES={devices}"] if devices else []
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_US
        self.nixl = nixl.nixlAgent(self.name, config)
        with _os_errors("a NIXL agent"):
            self._backends = [
                self.nixl.createBackend("UCX", {"engine_config": ",".join(options), "ucx_error_handling_mode": "peer"})
            ]
            region = self.address, self._memory.nbytes, max(0, self.device), ""
            self._regions = nixl.nixlRegDList(_segment(self.device), [region])
            self.nixl.registerMem(self._regions, self._backends)

    def metadata(self) -> bytes:
        """What a remote agent needs to write into the memory. Raises OSError."""
        with _os_errors("a NIXL agent"):
            return bytes(self.nixl.getLocalMD())

    def destroy(self) -> None:
        """End every remote right to write into its memory. NIXL does so when its last reference is dropped."""
        with contextlib.suppress(*ERRORS):
            self.nixl.deregisterMem(self._regions, self._backends)
        del self.nixl


class NixlRegisteredPool:
    """A pool that peers write into by NIXL: a RegisteredPool."""

    def __init__(self, layout: PoolLayout, memory: memoryview | DeviceMemory, devices: str = "") -> None:
        """layout: of the pool in memory. Raises OSError if there is no transport."""
        device = memory.device if isinstance(memory, DeviceMemory) else HOST
        self.memory = NixlMemory(version=VERSION, device=device, **asdict(layout))
        self._pool = memory
        self._devices = devices
        self._agents: dict[str, Agent] = {}
        self._spare: Agent | None = Agent(memory, devices)  # the first one takes long to create

    def grant(self, session: str) -> NixlAccess:
        """One agent per session, made on first use. Raises OSError."""
        agent = self._agents.get(session)
        if agent is None:
            agent, self._spare = self._spare or Agent(self._pool, self._devices), None
            self._agents[session] = agent
        return NixlAccess(metadata=agent.metadata(), address=agent.address)

    def revoke(self, session: str, stage: int) -> bool:
        """Ends the rights of all stages: a session ends as a whole. Always True."""
        agent = self._agents.pop(session, None)
        if agent is not None:
            agent.destroy()
        return True

    def close(self) -> None:
        """End all rights to write."""
        for session in list(self._agents):
            self.revoke(session, 0)
        if self._spare is not None:
            self._spare.destroy()
            self._spare = None


class NixlTransport:
    """Transport of a stage."""

    def __init__(self, memory: memoryview | DeviceMemory, devices: str = "") -> None:
        """memory: of the stage's own pool. Raises OSError when there is no transport."""
        self._agent = Agent(memory, devices)
        self._open: set[str] = set()

    def open(
        self, session: str, stage: int, geometry: Geometry, memory: PoolMemory, access: NixlAccess | None = None
    ) -> "NixlPages":
        """Load the peer's agent metadata. Raises OSError or ValueError."""
        if memory.nixl is None or access is None:
            raise ValueError("the peer granted no access")
        places = {tensor.name: place for tensor, place in placed(geometry, memory.nixl)}
        with _os_errors("the peer's NIXL agent"):
            name = self._agent.nixl.loadRemoteMD(access.metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name in self._open:
            raise ValueError("the peer's NIXL agent has the name of another one")
        self._open.add(name)
        return NixlPages(self._agent, name, geometry, memory.nixl, places, access.address, self._open)

    def close(self) -> None:
        """Destroy this stage's agent."""
        self._agent.destroy()


class NixlRemoteWrite:
    """A RemoteWrite. request: the posted NIXL request."""

    def __init__(self, agent: Agent, request: int | None, lost: str = "") -> None:
        self.lost = lost
        self._agent = agent
        self._request = request
        self._over = False

    @property
    def done(self) -> bool:
        """Asks NIXL until the request has completed."""
        if not self._over and not self.lost:
            self._ask()
        return self._over

    def end(self) -> None:
        """Release the request, complete or not."""
        self._over = True
        if self._request is not None:
            with contextlib.suppress(*ERRORS):
                self._agent.nixl.releaseXferReq(self._request)
            self._request = None

    def _ask(self) -> None:
        try:
            status = self._agent.nixl.getXferStatus(self._request)
        except ERRORS as error:
            self.lost = f"NIXL: {error}"
            return
        if status == nixl.NIXL_SUCCESS:
            self.end()
        elif status != nixl.NIXL_IN_PROG:
            self.lost = f"NIXL: {status}"


class NixlPages(RemotePages):
    """A peer's pool, written by NIXL."""

    def __init__(
        self,
        agent: Agent,
        peer: str,
        geometry: Geometry,
        memory: NixlMemory,
        places: Mapping[str, Placement],
        address: int,
        names: set[str],
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._address = address
        self._places = places
        self._pages = memory.pages
        self._extents = {
            each.name: geometry.extent(each, memory.pages, memory.state_slots) for each in geometry.tensors
        }
        self._whole = _dense_place(geometry, memory.pages, places)
        self._names = names
        self._segments = (agent.device, memory.device)  # ours, theirs
        self.by_address = agent.device != HOST
        self.unchecked = self.by_address or memory.device != HOST
        self._batch: list[tuple[Offsets, Offsets, int]] = []
        self._writes: list[NixlRemoteWrite] = []

    def write(self, page: int, first_slot: int, count: int, data: Bytes, box: Box = WHOLE) -> None:
        """Queued for the next flush. Raises IndexError."""
        check_slots(page, first_slot, count, *self._extents[box.tensor])
        layer, head = box.layers.start or 0, box.heads.start or 0
        place = self._places[box.tensor]
        page_bytes, layer_bytes, _, head_bytes, slot_bytes = place.strides
        start = place.offset + page * page_bytes + layer * layer_bytes + head * head_bytes + first_slot * slot_bytes
        here, there, length = runs(data.shape, data.strides[:-1], place.strides[1:])
        self._batch.append((here + data.ctypes.data, there + (self._address + start), length))

    def write_pages(self, pages: Sequence[int], store: SourcePages, own: Sequence[int]) -> None:
        """Queued for the next flush. Raises IndexError."""
        rows = store.rows
        if rows is None or self._whole is None:
            super().write_pages(pages, store, own)
            return
        there = page_numbers(pages, self._pages).astype(np.int64)
        here = page_numbers(own, len(rows)).astype(np.int64)
        size = rows.shape[1]
        start = self._address + self._whole.offset
        self._batch.append((here * size + rows.ctypes.data, there * size + start, size))

    def flush(self) -> NixlRemoteWrite:
        """Post the queued writes as one NIXL request."""
        batch, self._batch = self._batch, []
        if not batch:
            return self._begun(None)
        sources, targets = (np.concatenate([part[side] for part in batch]) for side in (0, 1))
        lengths = np.repeat([length for _, _, length in batch], [len(here) for here, _, _ in batch])
        here, there = (
            nixl.nixlXferDList(
                _segment(device),
                np.stack([side, lengths, np.full_like(side, max(0, device))], axis=1).astype(np.uint64),
            )
            for side, device in zip((sources, targets), self._segments, strict=True)
        )
        agent = self._agent.nixl
        try:
            request = agent.createXferReq(nixl.NIXL_WRITE, here, there, self._peer)
        except ERRORS as error:
            return self._begun(None, f"NIXL: {error}")
        try:
            agent.postXferReq(request)
        except ERRORS as error:
            return self._begun(request, f"NIXL: {error}")
        return self._begun(request)

    def close(self) -> Completed:
        """Forget the peer's agent and release all requests."""
        with contextlib.suppress(*ERRORS):
            self._agent.nixl.invalidateRemoteMD(self._peer)
        for write in self._writes:
            write.end()
        self._writes.clear()
        self._names.discard(self._peer)
        return Completed()

    def _begun(self, request: int | None, lost: str = "") -> NixlRemoteWrite:
        begun = NixlRemoteWrite(self._agent, request, lost)
        if request is None and not lost:
            begun.end()
        self._writes = [write for write in self._writes if not write.done]
        self._writes.append(begun)
        return begun


def _segment(device: int) -> Any:
    """NIXL's kind of memory: of a GPU, or of the host."""
    return nixl.DRAM_SEG if device == HOST else nixl.VRAM_SEG


def _dense_place(geometry: Geometry, pages: int, places: Mapping[str, Placement]) -> Placement | None:
    """The place of the only tensor of a pool in which pages lie without gaps; None in other pools."""
    if len(geometry.tensors) != 1:
        return None
    (name,) = places
    dense = {tensor.name: place.strides for tensor, place in placed(geometry, c_order(geometry, pages))}
    return places[name] if places[name].strides == dense[name] else None


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    """NIXL's errors as OSError."""
    try:
        yield
    except ERRORS as error:
        raise OSError(f"{what}: {error}") from error
