"""Checks that a rank's orders are those that the scheduler sent, and that its passes are those of the other replicas.

Two streams are counted and hashed (core/runtime/codec.py): the orders to this rank's replica, and what all replicas
agreed on for each pass. A Heartbeat carries the scheduler's counts and digests of both.
"""

import msgspec

from headrace.core.messages.orders import AnyOrder, Forward, Heartbeat, pass_frame
from headrace.core.runtime.codec import OrderLog


class OrderMismatch(Exception):
    """The orders that this rank received are not those that the scheduler sent, or contradict each other."""


class OrderCheck:
    """The streams of one rank."""

    def __init__(self, replica: int) -> None:
        """replica: data-parallel replica of the rank."""
        self._replica = replica
        self._orders = OrderLog()
        self._passes = OrderLog()
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def count(self) -> int:
        """Orders so far."""
        return self._orders.count

    def add(self, frame: bytes, order: AnyOrder) -> None:
        """Add the next order, with its encoding. Raises OrderMismatch for a pass whose rows are not those that all
        replicas count on: it must not be computed."""
        self._orders.add(frame)
        if isinstance(order, Forward) and order.agreement is not None:
            self._passes.add(pass_frame(order))
            agreed, tokens = order.agreement.tokens, sum(row.count for row in order.rows)
            if not self._replica < len(agreed) or agreed[self._replica] != tokens:
                raise OrderMismatch(
                    f"order {order.seq} has {tokens} tokens of replica {self._replica}; agreed are {agreed}"
                )

    def check(self, heartbeat: Heartbeat) -> None:
        """Compare with what the scheduler has sent. Raises OrderMismatch."""
        sent = (heartbeat.orders, heartbeat.digest)
        if (self._orders.count, self._orders.digest) != sent:
            raise OrderMismatch(f"the stage's orders are not the scheduler's: {_texts(self._orders, sent)}")
        sent = (heartbeat.passes, heartbeat.pass_digest)
        if (self._passes.count, self._passes.digest if self._passes.count else b"") != sent:
            raise OrderMismatch(f"the stage's passes are not those of all replicas: {_texts(self._passes, sent)}")


def _texts(log: OrderLog, sent: tuple[int, bytes]) -> str:
    return f"{log.count} ({log.digest.hex()}) received, {sent[0]} ({sent[1].hex()}) sent"
