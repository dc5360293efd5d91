"""Writes into the memory of a decode rank by NIXL, with an agent of our own for each rank.

An agent that is destroyed takes its connection with it, so that no byte arrives any more: that is how writes are ended
that would not end by themselves, and the proof that they have. UCX's transports between processes of one host are
switched off for that, as everywhere (backends/nixl.py).
"""

import contextlib

import numpy as np
import numpy.typing as npt
from nixl import _bindings as nixl

from headrace.gateway.sglang_nixl.decode_rank import VRAM, DecodeRank
from headrace.gateway.sglang_nixl.pool_runs import Offsets, Runs
from headrace.transfer.backends.base import RemoteWrite
from headrace.transfer.backends.nixl import ERRORS, Agent, NixlRemoteWrite


class NixlRankWriter:
    """A RankWriter by NIXL. Raises OSError if there is no transport, ValueError for an agent that is another one."""

    def __init__(self, rank: DecodeRank, pool: memoryview, devices: str = "") -> None:
        self._agent = Agent(pool, devices)
        self._device = rank.registration.gpu
        self._kv_segment = nixl.VRAM_SEG if rank.memory_kind == VRAM else nixl.DRAM_SEG
        self._peer = rank.registration.agent
        self._open: list[NixlRemoteWrite] = []
        try:
            name = self._agent.nixl.loadRemoteMD(rank.registration.agent_metadata)
        except ERRORS as error:
            self._agent.destroy()
            raise OSError(f"the decode engine's NIXL agent: {error}") from error
        name = name.decode() if isinstance(name, bytes) else str(name)
        if name != self._peer:
            self._agent.destroy()
            raise ValueError(f"the decode engine's NIXL agent is {name}, and it registered {self._peer}")

    def write_kv(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its KV."""
        return self._write(runs, self._kv_segment, self._device if self._kv_segment == nixl.VRAM_SEG else 0)

    def write_row(self, runs: Runs) -> RemoteWrite:
        """Start writing runs of the pool into its metadata buffers, which are in host memory."""
        return self._write(runs, nixl.DRAM_SEG, 0)

    def close(self) -> None:
        """Destroy our agent."""
        with contextlib.suppress(*ERRORS):
            self._agent.nixl.invalidateRemoteMD(self._peer)
        for write in self._open:
            write.end()
        self._open.clear()
        self._agent.destroy()

    def _write(self, runs: Runs, segment: object, device: int) -> NixlRemoteWrite:
        here = nixl.nixlXferDList(nixl.DRAM_SEG, _descriptors(runs.here + self._agent.address, runs.lengths, 0))
        there = nixl.nixlXferDList(segment, _descriptors(runs.there, runs.lengths, device))
        request, lost = None, ""
        try:
            request = self._agent.nixl.createXferReq(nixl.NIXL_WRITE, here, there, self._peer)
            self._agent.nixl.postXferReq(request)
        except ERRORS as error:
            lost = f"NIXL: {error}"
        begun = NixlRemoteWrite(self._agent, request, lost)
        self._open = [*(write for write in self._open if not write.done), begun]
        return begun


def _descriptors(starts: Offsets, lengths: Offsets, device: int) -> npt.NDArray[np.uint64]:
    """NIXL's form of runs: address, length, device of each."""
    return np.stack([starts, lengths, np.full_like(starts, device)], axis=1).astype(np.uint64)
