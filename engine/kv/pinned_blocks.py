"""A fixed amount of pinned host memory in equal blocks, which copies to and from a GPU go through."""

import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.types.errors import ConfigError
from headrace.core.types.kv.geometry import ceil_div

ALIGNMENT = 4096  # bytes, of blocks


class PinnedLease:
    """Blocks of pinned memory. They are free again when nothing refers to the lease or to an array of it any more."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        """blocks: each uint8 [block bytes]."""
        self.blocks = blocks

    def array(self, block: int, at: int, size: int) -> NDArray[np.uint8]:
        """Bytes [at, at + size) of a block, in place."""
        array: NDArray[np.uint8] = self.blocks[block][at : at + size].numpy()
        weakref.finalize(array, _let_go, self).atexit = False  # until then it refers to the lease
        return array


def _let_go(_: PinnedLease) -> None:
    """An array of the lease is gone."""


class PinnedBlocks:
    """Leases blocks of pinned memory. Leases may end in any thread.

    A peer that reads slowly holds what was read for it. So that others go on, one that holds blocks gets more only
    while that is no more than what is left (Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory
    Packet Switches, 1998, with a factor of one).
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8 [blocks, block bytes]."""
        self._memory = memory
        self._free = deque(range(len(memory)))

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._memory.shape[1]

    @property
    def free(self) -> int:
        """Blocks that are not leased."""
        return len(self._free)

    def lease(self, count: int, held: int = 0) -> PinnedLease | None:
        """PinnedLease so many blocks; None when they are not to be had now.

        held: bytes that the same peer holds already. Where it holds nothing, it gets more blocks than there are, too.
        """
        if not held and count > len(self._memory):
            return self.beyond(count)
        if count > self.free or (held and held + count * self.block_bytes > self.free * self.block_bytes):
            return None
        numbers = [self._free.popleft() for _ in range(count)]
        lease = PinnedLease([self._memory[number] for number in numbers])
        weakref.finalize(lease, self._free.extend, numbers).atexit = False
        return lease

    def beyond(self, count: int) -> PinnedLease:
        """Blocks of their own, which are given back to the allocator of pinned memory."""
        return PinnedLease(list(_pinned(count, self.block_bytes)))


def pinned_blocks(total_bytes: int, piece_bytes: int, block_bytes: int) -> PinnedBlocks:
    """Pinned memory of so many bytes, in blocks of block_bytes, or of piece_bytes where one piece takes more.

    Raises ConfigError when the system refuses it.
    """
    size = ceil_div(max(piece_bytes, block_bytes), ALIGNMENT) * ALIGNMENT
    try:
        return PinnedBlocks(_pinned(ceil_div(total_bytes, size), size))
    except RuntimeError as error:
        text = f"{total_bytes >> 20} MiB of pinned host memory, for KV on its way, are not to be had: {error}"
        raise ConfigError(f"{text}; write a smaller --chunk-tokens") from error


def _pinned(blocks: int, block_bytes: int) -> Tensor:
    return torch.empty(blocks, block_bytes, dtype=torch.uint8, pin_memory=True)
