"""Stands in for torch.distributed where ranks are threads: what PipelineLinks calls of it."""

import threading
from collections import Counter
from datetime import timedelta
from typing import NamedTuple

from torch import Tensor

DEADLINE_S = 30.0  # for any wait of a rank for another


class Work(NamedTuple):
    """An operation of a World under way. key: of the message that it waits for; None for a sender."""

    world: "World"
    key: object | None = None
    tensor: Tensor | None = None

    def is_completed(self) -> bool:
        return self.key is None or self.world.has(self.key)

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.tensor is not None and self.key is not None:
            self.tensor.copy_(self.world.take(self.key))


class World:
    """The calls of torch.distributed that PipelineLinks makes, among threads."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._mail: dict[object, Tensor] = {}
        self._turns: Counter[object] = Counter()  # broadcasts of a rank
        self._own = threading.local()
        self._broken = ""

    def enter(self, rank: int) -> None:
        """This thread is a rank from now on."""
        self._own.rank = rank

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._post((self._own.rank, dst, tag), tensor)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        return Work(self, (src, self._own.rank, tag), tensor)

    def broadcast(self, tensor: Tensor, src: int, group: object, async_op: bool) -> Work:
        assert async_op
        self._turns[self._own.rank] += 1
        key = (group, self._turns[self._own.rank])
        return self._post(key, tensor) if self._own.rank == src else Work(self, key, tensor)

    def has(self, key: object) -> bool:
        with self._condition:
            return key in self._mail

    def take(self, key: object) -> Tensor:
        with self._condition:
            there = self._condition.wait_for(lambda: self._broken or key in self._mail, DEADLINE_S)
            if self._broken or not there:
                raise RuntimeError(self._broken or f"{key} did not come")
            return self._mail[key]

    def leave(self, reason: str) -> None:
        """Break it: all that wait raise."""
        with self._condition:
            self._broken = reason
            self._condition.notify_all()

    def _post(self, key: object, tensor: Tensor) -> Work:
        with self._condition:
            assert key not in self._mail, f"{key} is sent twice"
            self._mail[key] = tensor.clone()
            self._condition.notify_all()
        return Work(self)
