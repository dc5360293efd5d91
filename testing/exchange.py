"""The simulated exchange of lockstep replicas: no rank computes a pass before all ranks of its stage have come to it.

A replica that is not told of a pass leaves the others waiting for ever, as it would in a collective.
"""

from collections.abc import Callable

from headrace.core.messages.orders import Forward
from headrace.core.types.ranks.coordinate import Agreement


class SimulatedExchange:
    """Where the replicas of one engine meet."""

    def __init__(self, replicas: int, violation: Callable[[str], None]) -> None:
        """violation: is told what is wrong with an order."""
        self._replicas = replicas
        self._violation = violation
        self._waiting: dict[tuple[int, int], dict[int, Callable[[], None]]] = {}
        self._agreements: dict[int, Agreement] = {}

    def ordered(self, replica: int, order: Forward) -> None:
        """A replica was told of a pass: check the agreement as its ranks do."""
        agreement = order.agreement
        if agreement is None or len(agreement.tokens) != self._replicas:
            self._violation(f"pass {order.seq} has the agreement {agreement} of {self._replicas} replicas")
            return
        if (tokens := sum(row.count for row in order.rows)) != agreement.tokens[replica]:
            self._violation(f"pass {order.seq} has {tokens} tokens of replica {replica}, not {agreement}")
        if agreement.idle or self._agreements.setdefault(order.seq, agreement) != agreement:
            self._violation(f"pass {order.seq} has {agreement}, and {self._agreements[order.seq]} elsewhere")

    def enter(self, stage: int, seq: int, replica: int, go_on: Callable[[], None]) -> None:
        """A rank has come to a pass; it goes on once the ranks of all replicas have."""
        waiting = self._waiting.setdefault((stage, seq), {})
        if replica in waiting:
            self._violation(f"pass {seq} has replica {replica} twice")
        waiting[replica] = go_on
        if len(waiting) == self._replicas:
            for each in self._waiting.pop((stage, seq)).values():
                each()

    @property
    def waits(self) -> bool:
        """Whether ranks wait for others."""
        return bool(self._waiting)
