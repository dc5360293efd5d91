"""Count and digest of the orders to each data-parallel replica, which its ranks compare with their own."""

from collections.abc import Iterable

from headrace.core.messages.orders import AnyOrder, Forward, Heartbeat, pass_frame
from headrace.core.runtime.codec import OrderLog


class ReplicaStreams:
    """The streams of orders to the replicas of one group, and the passes that lockstep ones have in common."""

    def __init__(self, replicas: int) -> None:
        self.orders = 0
        """Orders so far, each counted once."""

        self._logs = [OrderLog() for _ in range(replicas)]
        self._passes = OrderLog()
        self._last_pass = 0  # its number: each replica gets a Forward of it

    def add(self, replicas: Iterable[int], frame: bytes, order: AnyOrder) -> None:
        """Add an order that is sent to these replicas. frame: as encoded."""
        self.orders += 1
        for replica in replicas:
            self._logs[replica].add(frame)
        if isinstance(order, Forward) and order.agreement is not None and order.seq > self._last_pass:
            self._last_pass = order.seq
            self._passes.add(pass_frame(order))

    def heartbeat(self, replica: int) -> Heartbeat:
        """The heartbeat to the ranks of a replica."""
        log, passes = self._logs[replica], self._passes
        pass_digest = passes.digest if passes.count else b""
        return Heartbeat(seq=0, orders=log.count, digest=log.digest, passes=passes.count, pass_digest=pass_digest)
