"""Stands in for torch.distributed where ranks are threads: what PipelineLinks calls of it.

As with Gloo, no operation is completed before it was waited for, and a send not before its receive was posted.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Container
from datetime import timedelta
from weakref import WeakSet

from torch import Tensor

DEADLINE_S = 30.0  # for any wait of a rank for another


class Work:
    """An operation of a World under way."""

    def __init__(self, world: "World", key: object, tensor: Tensor | None = None) -> None:
        """key: of its message. tensor: where the message goes; None for a sender."""
        self._world = world
        self._key = key
        self._tensor = tensor

    def wait(self, timeout: timedelta | None = None) -> None:
        if self._tensor is None:
            self._world.await_receiver(self._key)
        else:
            self._tensor.copy_(self._world.take(self._key))


class World:
    """The calls of torch.distributed that PipelineLinks makes, among threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._mail: dict[object, Tensor] = {}
        self._expected: set[object] = set()  # messages whose receive was posted
        self._works: defaultdict[int, WeakSet[Work]] = defaultdict(WeakSet)  # by rank
        self._turns: Counter[object] = Counter()  # broadcasts of a rank
        self._own = threading.local()
        self._broken = ""

    def enter(self, rank: int) -> None:
        """This thread is a rank from now on."""
        self._own.rank = rank

    def kept(self, rank: int) -> int:
        """Operations that a rank remembers, each with its tensor."""
        with self._condition:
            return len(self._works[rank])

    def isend(self, tensor: Tensor, dst: int, group: None = None, tag: int = 0) -> Work:
        return self._post((self._own.rank, dst, tag), tensor)

    def irecv(self, tensor: Tensor, src: int, group: None = None, tag: int = 0) -> Work:
        return self._expect((src, self._own.rank, tag), tensor)

    def broadcast(self, tensor: Tensor, src: int, group: object, async_op: bool) -> Work:
        assert async_op
        self._turns[self._own.rank] += 1
        key = (group, self._turns[self._own.rank])
        return self._post(key, tensor) if self._own.rank == src else self._expect(key, tensor)

    def has(self, key: object) -> bool:
        with self._condition:
            return key in self._mail

    def take(self, key: object) -> Tensor:
        with self._condition:
            self._wait_for(key, self._mail)
            return self._mail[key]

    def await_receiver(self, key: object) -> None:
        with self._condition:
            self._wait_for(key, self._expected)

    def leave(self, reason: str) -> None:
        """Break it: all that wait raise."""
        with self._condition:
            self._broken = reason
            self._condition.notify_all()

    def _post(self, key: object, tensor: Tensor) -> Work:
        with self._condition:
            assert key not in self._mail, f"{key} is sent twice"
            self._mail[key] = tensor.clone()
            return self._begun(key)

    def _expect(self, key: object, tensor: Tensor) -> Work:
        with self._condition:
            self._expected.add(key)
            return self._begun(key, tensor)

    def _begun(self, key: object, tensor: Tensor | None = None) -> Work:
        work = Work(self, key, tensor)
        self._works[self._own.rank].add(work)
        self._condition.notify_all()
        return work

    def _wait_for(self, key: object, messages: Container[object]) -> None:
        there = self._condition.wait_for(lambda: self._broken or key in messages, DEADLINE_S)
        if self._broken or not there:
            raise RuntimeError(self._broken or f"{key} did not come")
