"""The memory that request bodies may take while they are being received, over all connections."""

from headrace.core.stats import Counters, Sample
from headrace.core.types.errors import unavailable

BODIES = 8  # of the largest size, half of which has come
LEAST_BYTES = 64 << 20


class BodyBudget:
    """Bytes of bodies of which more is to come, bounded. Used by the event loop only."""

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = max(BODIES * max_body_bytes, LEAST_BYTES)
        self._used = 0
        self._counters = Counters()
        self._counters.add("http_bodies_refused_total", 0)

    def check(self, size: int) -> None:
        """Raises HeadraceError (503) if a body of this size does not fit now."""
        if self._used + size > self._limit:
            self._counters.add("http_bodies_refused_total")
            message = (
                f"bodies that are being received take {self._used} bytes, and the limit for all of them is "
                f"{self._limit}; retry, or send less in one request"
            )
            raise unavailable(message, code="too_many_bodies")

    def take(self, size: int) -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self.check(size)
        self._used += size

    def give_back(self, size: int) -> None:
        """Count no longer what was counted of a body."""
        self._used -= size

    def statistics(self) -> tuple[Sample, ...]:
        """Bytes now, and bodies that were refused."""
        return (Sample("http_body_bytes", self._used), *self._counters.snapshot())


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self._budget.take(size)
        self._taken += size

    def give_back(self) -> None:
        """The body is whole, or has ended otherwise."""
        self._budget.give_back(self._taken)
        self._taken = 0
