"""Collective operations among threads of this process, for tests of parallel models without further processes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from headrace.engine.collectives.operations import Collectives, Done, LinkBroken

T = TypeVar("T")
DEADLINE_S = 30.0


class Meeting:
    """Where the threads of a group exchange tensors: one round for each operation. A rank that does not come breaks the
    round, and all that wait in it raise LinkBroken, which names the missing ranks."""

    def __init__(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        self.size = size
        self._deadline_s = deadline_s
        self._condition = threading.Condition()
        self._rounds: list[dict[int, tuple[str, Tensor]]] = []
        self._broken = ""

    def meet(self, turn: int, rank: int, operation: str, x: Tensor) -> list[Tensor]:
        """Leave a tensor for this turn, and take those of all ranks, in order, once they are there."""
        with self._condition:
            while len(self._rounds) <= turn:
                self._rounds.append({})
            there = self._rounds[turn]
            there[rank] = (operation, x.clone())
            self._condition.notify_all()
            met = self._condition.wait_for(lambda: self._broken or len(there) == self.size, self._deadline_s)
            if self._broken or not met:
                missing = [rank for rank in range(self.size) if rank not in there]
                self._broken = self._broken or f"ranks {missing} did not come to operation {turn}, {operation}"
                self._condition.notify_all()
                raise LinkBroken(self._broken)
            if len({name for name, _ in there.values()}) > 1:
                raise LinkBroken(f"operation {turn} differs: { ({each: name for each, (name, _) in there.items()}) }")
            return [there[rank][1] for rank in range(self.size)]

    def leave(self, reason: str) -> None:
        """Break the group."""
        with self._condition:
            self._broken = self._broken or reason
            self._condition.notify_all()


class ThreadCollectives:
    """One thread's part of a group of threads. Operations are complete when they return."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.size = meeting.size
        self.rank = rank
        self.operations: list[str] = []
        """What was called, in order."""
        self.name = ""
        self.log: list[str] = []
        """The same after the name; groups may be given one log in common."""
        self._meeting = meeting

    def all_reduce(self, x: Tensor) -> Done:
        """See Collectives."""
        return Done(self._sum(self._meet(f"all_reduce {tuple(x.shape)} {x.dtype}", x)))

    def all_gather(self, x: Tensor) -> Done:
        """See Collectives."""
        return Done(torch.cat(self._meet(f"all_gather {tuple(x.shape)} {x.dtype}", x)))

    def reduce_scatter(self, x: Tensor) -> Done:
        """See Collectives."""
        summed = self._sum(self._meet(f"reduce_scatter {tuple(x.shape)} {x.dtype}", x))
        return Done(summed.chunk(self.size)[self.rank])

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Done:
        """See Collectives."""
        splits = self._meet("counts of all_to_all", torch.tensor(sent))
        there = [int(counts[self.rank]) for counts in splits]
        if len(x) != sum(sent) or there != list(received):
            self._meeting.leave(f"rank {self.rank} expects {list(received)} rows and gets {there}")
        rows = self._meet(f"all_to_all {tuple(x.shape[1:])} {x.dtype}", x)
        parts = [all_rows.split(counts.tolist())[self.rank] for all_rows, counts in zip(rows, splits, strict=True)]
        return Done(torch.cat(parts))

    def broadcast(self, x: Tensor, source: int) -> Done:
        """See Collectives."""
        return Done(self._meet(f"broadcast {tuple(x.shape)} {x.dtype} from {source}", x)[source])

    def gather(self, x: Tensor, destination: int) -> Done:
        """See Collectives."""
        parts = self._meet(f"gather {tuple(x.shape)} {x.dtype} to {destination}", x)
        return Done(torch.cat(parts) if self.rank == destination else x[:0])

    def _meet(self, operation: str, x: Tensor) -> list[Tensor]:
        self.operations.append(operation)
        self.log.append(f"{self.name} {operation}")
        return self._meeting.meet(len(self.operations) - 1, self.rank, operation, x)

    @staticmethod
    def _sum(parts: list[Tensor]) -> Tensor:
        """In order of rank, so that all ranks have the same bits."""
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total


def run_ranks(size: int, work: Callable[[Collectives], T], deadline_s: float = DEADLINE_S) -> list[T]:
    """The results of work() at each rank of a group of threads, in order.

    A rank that raises breaks the group; the first error is raised here.
    """
    meeting = Meeting(size, deadline_s)
    errors: list[BaseException] = []

    def one(rank: int) -> T:
        try:
            return work(ThreadCollectives(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.leave(f"rank {rank} has failed: {error}")
            raise

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(one, rank) for rank in range(size)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
