"""Collective operations of ranks on the CPU of one machine, through shared memory (shared_sums.c).

Sums are made in order of rank, in float32 for float32 and bfloat16, and rounded once: they depend on nothing but the
numbers. What shared memory does not do goes over the group that it was formed by.
"""

import ctypes
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.runtime.cpu import usable_cores
from headrace.core.runtime.native_library import load_library
from headrace.engine.collectives.operations import Collectives, Done, LinkBroken, Pending
from headrace.engine.collectives.segment import MOST_RANKS, Segment, form_segment

log = logging.getLogger(__name__)

SPIN_NS = 100_000  # before a waiting rank sleeps: about as long as it takes to wake up twice
ALL = -1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2}  # that are summed, as numbered in shared_sums.c
_PROBLEMS = ("", "has ended", "did not come in {seconds:g} s", "is in another operation")  # numbered in shared_sums.c
_I, _P = ctypes.c_int64, ctypes.c_void_p


class GroupRecord(ctypes.Structure):
    """struct group of shared_sums.c. memory and sockets are addresses; the caller keeps what is there alive."""

    _fields_ = (
        ("memory", _P),
        ("sockets", _P),
        *((name, _I) for name in ("size", "rank", "turn", "tile", "spin_ns", "timeout_ns")),
    )


class SharedMemoryCollectives:
    """Collectives over a segment that all ranks have mapped. Operations are complete when they return. Used by one
    thread."""

    def __init__(self, library: ctypes.CDLL, segment: Segment, others: Collectives, timeout_s: float) -> None:
        """library: from shared_sums(). others: the same ranks, for what shared memory does not do. timeout_s: that an
        operation waits for another rank."""
        self.size = segment.size
        self.rank = segment.rank
        self._library = library
        self._segment = segment
        self._others = others
        # Where ranks share cores, spinning would only keep the rank that is waited for from its core.
        spin_ns = SPIN_NS if usable_cores() >= self.size else 0
        self._record = GroupRecord(
            memory=segment.address,
            sockets=ctypes.addressof(segment.sockets),
            size=self.size,
            rank=self.rank,
            spin_ns=spin_ns,
        )
        self.timeout_s = timeout_s

    @property
    def timeout_s(self) -> float:
        """Seconds that an operation waits for another rank."""
        return float(self._record.timeout_ns) / 1e9

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._record.timeout_ns = int(seconds * 1e9)

    def all_reduce(self, x: Tensor) -> Pending:
        """See Collectives."""
        if x.dtype not in _DTYPES:
            return self._others.all_reduce(x)
        x = x.contiguous()
        number = _DTYPES[x.dtype]
        self._check(self._library.headrace_shared_sum(ctypes.byref(self._record), x.data_ptr(), x.numel(), number))
        return Done(x)

    def all_gather(self, x: Tensor) -> Pending:
        """See Collectives."""
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._gather(x.contiguous(), gathered, x.nbytes, ALL)
        return Done(gathered)

    def reduce_scatter(self, x: Tensor) -> Pending:
        """See Collectives."""
        return self._others.reduce_scatter(x)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Pending:
        """See Collectives."""
        return self._others.all_to_all(x, sent, received)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """See Collectives."""
        x = x.contiguous()
        own, to = (x, None) if self.rank == source else (None, x)
        self._gather(own, to, x.nbytes, source)
        return Done(x)

    def gather(self, x: Tensor, destination: int) -> Pending:
        """See Collectives."""
        rows = self.size * x.shape[0] if self.rank == destination else 0
        gathered = x.new_empty(rows, *x.shape[1:])
        self._gather(x.contiguous(), gathered if self.rank == destination else None, x.nbytes, ALL)
        return Done(gathered)

    def close(self) -> None:
        """Leave the group: operations of the others fail."""
        self._segment.close()

    def _gather(self, own: Tensor | None, to: Tensor | None, size: int, source: int) -> None:
        """See headrace_shared_gather(). size: in bytes."""
        self._check(
            self._library.headrace_shared_gather(
                ctypes.byref(self._record),
                None if own is None else own.data_ptr(),
                None if to is None else to.data_ptr(),
                size,
                source,
            )
        )

    def _check(self, result: int) -> None:
        problem, rank = divmod(result, MOST_RANKS)
        if problem:
            text = _PROBLEMS[problem].format(seconds=self.timeout_s)
            raise LinkBroken(f"shard {rank} {text}")


def on_one_machine(group: Collectives, timeout_s: float) -> Collectives:
    """Collectives through shared memory, if all ranks of a group on the CPU are on one machine; else the group itself.

    timeout_s: of one operation. All ranks have to call this at once. Raises LinkBroken when a rank is gone.
    """
    library = shared_sums()
    segment = form_segment(group, library.headrace_shared_bytes(group.size) if library is not None else 0)
    if group.rank == 0:
        log.info("shards add up %s", "over Gloo" if segment is None else "through shared memory")
    if library is None or segment is None:
        return group
    return SharedMemoryCollectives(library, segment, group, timeout_s)


@cache
def shared_sums() -> ctypes.CDLL | None:
    """The native code; None where it was not compiled, or on another system than Linux. torch has to be imported first:
    its OpenMP runtime is shared."""
    library = load_library(Path(__file__).parent, "shared_sums") if sys.platform == "linux" else None
    if library is not None:
        library.headrace_shared_bytes.argtypes, library.headrace_shared_bytes.restype = (_I,), _I
        group = ctypes.POINTER(GroupRecord)
        library.headrace_shared_sum.argtypes, library.headrace_shared_sum.restype = (group, _P, _I, _I), _I
        library.headrace_shared_gather.argtypes = (group, _P, _P, _I, _I)
        library.headrace_shared_gather.restype = _I
    return library
