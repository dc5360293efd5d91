"""The connector's half in vLLM's worker: loads go to the peer, and what has arrived goes into the KV cache.

Everything here runs on the worker's own thread. The cache is written by the call that the forward pass makes itself,
since only the attention backend knows how its pages are laid out; a request's blocks are vLLM's again once it was
reported finished, and never written after that.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.core.runtime.clock import Clock
from headrace.integrations.peer.commands import (
    AnyCommand,
    AnyResult,
    CancelLoad,
    Loaded,
    LoadFailed,
    LoadKv,
    RejectTicket,
    ReleaseLoad,
)
from headrace.integrations.peer.thread import PeerFailed

log = logging.getLogger("vllm.headrace")  # a name that vLLM's logging shows

WRITE_BUDGET_S = 0.02  # of one step
# While a load is open and there is nothing to compute, vLLM takes step after step, which costs a core and more that the
# peer needs. So long each of them waits for what the peer says; a request that comes in meanwhile waits, too.
IDLE_WAIT_S = 0.005


class PeerPort(Protocol):
    """What is needed of headrace.integrations.peer.thread.Peer."""

    def submit(self, *commands: AnyCommand) -> None: ...

    def results(self, wait_s: float = 0.0) -> list[AnyResult]: ...


class AttentionLayer(Protocol):
    """One attention layer of vLLM."""

    impl: Any


@dataclass(slots=True)
class CacheWrite:
    """KV that has arrived and is not all in the cache. slots: int64, one for each token. layer: the next one."""

    loaded: Loaded
    slots: Tensor
    layer: int = 0


class Worker:
    """layers: attention layers with their KV caches, in order. staged: [layers, 2, kv_heads, tokens, head_dim], the
    peer's staging area in the cache's dtype. block_size: tokens in a block of vLLM's."""

    def __init__(
        self,
        peer: PeerPort,
        layers: Sequence[tuple[AttentionLayer, Tensor]],
        staged: Tensor,
        block_size: int,
        clock: Clock,
    ) -> None:
        self._peer = peer
        self._layers = layers
        self._staged = staged
        self._block_size = block_size
        self._clock = clock
        self._blocks: dict[str, tuple[int, ...]] = {}  # of loads that vLLM waits for
        self._cancelled: set[str] = set()
        self._writes: dict[str, CacheWrite] = {}
        self._dead = ""

    def __len__(self) -> int:
        return len(self._blocks)

    def obey(self, commands: tuple[AnyCommand, ...], blocks: dict[str, tuple[int, ...]]) -> None:
        """Begin what the scheduler's half asks for in this step."""
        for command in commands:
            if isinstance(command, LoadKv | RejectTicket):
                self._blocks[command.id] = blocks[command.id]
            elif isinstance(command, CancelLoad) and command.id in self._blocks:
                self._cancelled.add(command.id)
        if commands:
            self._peer.submit(*commands)

    def advance(self, *, idle: bool = False) -> tuple[set[str], set[str]]:
        """(requests that are finished since the last call, those of them that have failed). Writes what has arrived,
        for WRITE_BUDGET_S and at least one layer; each request is reported once. idle: nothing is computed in this
        step, so it may wait for IDLE_WAIT_S while a load is open."""
        failed: set[str] = set()
        finished: set[str] = set()
        waits = idle and self._blocks and not self._writes
        for result in self._results(IDLE_WAIT_S if waits else 0.0):
            if isinstance(result, Loaded) and result.id not in self._cancelled and result.id in self._blocks:
                self._writes[result.id] = CacheWrite(result, self._slots(result))
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
                log.error("the peer has ended, and no KV will be loaded any more: %s", error)
                self._dead = str(error)
            lost = self._blocks.keys() - self._writes.keys()
            return [LoadFailed(id=name, code="peer_failed", message=self._dead) for name in lost]

    def _write(self) -> set[str]:
        """Go on with what has arrived, first come first served."""
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
        """CacheWrite layer by layer; False when the time is up before the last one."""
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
        """The cache slot of every token that was loaded."""
        positions = torch.arange(loaded.start, loaded.start + loaded.count)
        blocks = torch.tensor(self._blocks[loaded.id], dtype=torch.int64)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return slots.to(self._layers[0][1].device)
