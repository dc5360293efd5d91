"""Worker, the connector's half in vLLM's worker: hands loads to the peer thread, writes loaded KV into vLLM's cache.

Everything here runs on vLLM's worker thread. The cache is written by the attention backend's own do_kv_cache_update,
since only the backend knows the layout of its pages. A request's blocks are never written after it was reported
finished, when they are vLLM's again.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.core.messages.replies import PrefillState
from headrace.core.runtime.clock import Clock
from headrace.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    Loaded,
    LoadFailed,
    LoadKv,
    RejectTicket,
    ReleaseLoad,
)
from headrace.peer.thread import PeerFailed

log = logging.getLogger("vllm.headrace")  # below "vllm", so that vLLM's logging shows it

WRITE_BUDGET_S = 0.02  # for writing to the cache, in one step
# While a load is open and nothing is to be computed, vLLM runs step after step and takes a core that the peer thread
# needs. Each of these steps waits this long for a result; a request that arrives meanwhile is delayed by it.
IDLE_WAIT_S = 0.005


class PeerPort(Protocol):
    """The methods of headrace.peer.thread.PeerThread that are used."""

    def submit(self, *commands: AnyCommand) -> None:
        """See PeerThread."""
        ...

    def results(self, wait_s: float = 0.0) -> list[AnyResult]:
        """See PeerThread."""
        ...


class AttentionLayer(Protocol):
    """One attention layer of vLLM."""

    impl: Any


@dataclass(slots=True)
class CacheWrite:
    """Loaded KV that is not written to all layers of the cache yet."""

    loaded: Loaded
    slots: Tensor  # int64 [tokens], in the cache
    layer: int = 0  # next to be written


class Worker:
    """Loads of one vLLM worker."""

    def __init__(
        self,
        peer: PeerPort,
        layers: Sequence[tuple[AttentionLayer, Tensor]],
        staged: Tensor,
        block_size: int,
        clock: Clock,
    ) -> None:
        """layers: attention layers with their KV caches, in layer order. staged: [layers, 2, kv_heads, tokens,
        head_dim], the staging area in the cache's dtype. block_size: tokens of a block of vLLM's cache."""
        self._peer = peer
        self._layers = layers
        self._staged = staged
        self._block_size = block_size
        self._clock = clock
        self._blocks: dict[str, tuple[int, ...]] = {}  # of loads that were not reported yet, by request id
        self._cancelled: set[str] = set()
        self._writes: dict[str, CacheWrite] = {}
        self._dead = ""  # why the peer thread has ended

    def __len__(self) -> int:
        """Loads that were not reported yet."""
        return len(self._blocks)

    def submit(self, commands: tuple[AnyCommand, ...], blocks: dict[str, tuple[int, ...]]) -> None:
        """Start this step's commands. blocks: by request id, vLLM's block ids for the whole prompt."""
        for command in commands:
            if isinstance(command, LoadKv | RejectTicket):
                self._blocks[command.id] = blocks[command.id]
            elif isinstance(command, CancelLoad) and command.id in self._blocks:
                self._cancelled.add(command.id)
        if commands:
            self._peer.submit(*commands)

    def poll(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """Write loaded KV to the cache, for WRITE_BUDGET_S and at least one layer, and report loads, each once.

        idle: nothing is computed in this step, so it may wait IDLE_WAIT_S for a result while a load is open. Returns
        (requests whose loads have ended since the last call, those of them that failed).
        """
        failed: set[str] = set()
        finished: set[str] = set()
        waits = idle and self._blocks and not self._writes
        for result in self._results(IDLE_WAIT_S if waits else 0.0):
            if isinstance(result, Loaded) and result.id not in self._cancelled and result.id in self._blocks:
                self._writes[result.id] = CacheWrite(result, self._slots(result))
                continue
            if isinstance(result, PrefillState):  # of no load
                continue
            if isinstance(result, Loaded):
                self._peer.submit(ReleaseLoad(id=result.id))
            elif isinstance(result, LoadFailed):
                log.warning("KV of request %s is not loaded: %s: %s", result.id, result.code, result.message)
                failed.add(result.id)
            finished.add(result.id)
        finished |= self._write()
        finished &= self._blocks.keys()
        for name in finished:
            del self._blocks[name]
            self._cancelled.discard(name)
        return finished, failed & finished

    def _results(self, wait_s: float) -> list[AnyResult]:
        try:
            return self._peer.results(wait_s)
        except PeerFailed as error:
            if not self._dead:
                log.error("the peer thread has ended, no KV will be loaded any more: %s", error)
                self._dead = str(error)
            lost = self._blocks.keys() - self._writes.keys()
            return [LoadFailed(id=name, code="peer_failed", message=self._dead) for name in lost]

    def _write(self) -> set[str]:
        """Continue writing, oldest load first. Returns the requests that are done."""
        deadline = self._clock.now() + WRITE_BUDGET_S
        done: set[str] = set()
        for name, write in self._writes.items():
            if name not in self._cancelled and not self._go_on(write, deadline):
                break
            done.add(name)
        for name in done:
            loaded = self._writes.pop(name).loaded
            self._peer.submit(ReleaseLoad(id=name))
            log.debug("%d tokens of request %s came in %.1f ms", loaded.count, name, 1000 * loaded.seconds)
        return done

    def _go_on(self, write: CacheWrite, deadline: float) -> bool:
        """Write layer by layer; False when the deadline passes before the last one."""
        at, end = write.loaded.at, write.loaded.at + write.loaded.count
        while write.layer < len(self._layers):
            layer, cache = self._layers[write.layer]
            keys, values = self._staged[write.layer, :, :, at:end].transpose(1, 2).to(cache.device)  # [2, T, H, D]
            layer.impl.do_kv_cache_update(layer, keys, values, cache, write.slots)
            write.layer += 1
            if write.layer < len(self._layers) and self._clock.now() >= deadline:
                return False
        return True

    def _slots(self, loaded: Loaded) -> Tensor:
        """Cache slots of the loaded tokens: int64 [tokens], on the cache's device."""
        positions = torch.arange(loaded.start, loaded.start + loaded.count)
        blocks = torch.tensor(self._blocks[loaded.id], dtype=torch.int64)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return slots.to(self._layers[0][1].device)
