"""The memory that request bodies may take while they are being received, over all connections.

A tenant with less than an equal share of it is let in beyond the limit, as in the queue of prompts.
"""

from headrace.core.shares import Shares
from headrace.core.stats import Counters, Sample
from headrace.core.types.errors import unavailable

BODIES = 8  # of the largest size, half of which has come
LEAST_BYTES = 64 << 20


class BodyBudget:
    """Bytes of bodies of which more is to come, bounded. Used by the event loop only."""

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = max(BODIES * max_body_bytes, LEAST_BYTES)
        self._shares = Shares()  # by name of the API key
        self._counters = Counters()
        self._counters.add("http_bodies_refused_total", 0)

    def check(self, size: int, tenant: str = "") -> None:
        """Raises HeadraceError (503) if a body of this size, of this tenant, does not fit now."""
        used = self._shares.total
        if used + size > self._limit and not self._shares.within_equal_share(tenant, size, self._limit):
            self._counters.add("http_bodies_refused_total")
            message = (
                f"bodies that are being received take {used} bytes, and the limit for all of them is "
                f"{self._limit}; retry, or send less in one request"
            )
            raise unavailable(message, code="too_many_bodies")

    def take(self, size: int, tenant: str = "") -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self.check(size, tenant)
        self._shares.add(tenant, size)

    def give_back(self, size: int, tenant: str = "") -> None:
        """Count no longer what was counted of a body."""
        self._shares.add(tenant, -size)

    def statistics(self) -> tuple[Sample, ...]:
        """Bytes now, and bodies that were refused."""
        return (Sample("http_body_bytes", self._shares.total), *self._counters.snapshot())


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget, tenant: str = "") -> None:
        self._budget = budget
        self._tenant = tenant
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self._budget.take(size, self._tenant)
        self._taken += size

    def give_back(self) -> None:
        """The body is whole, or has ended otherwise."""
        self._budget.give_back(self._taken, self._tenant)
        self._taken = 0
