"""What each tenant has been served, and which tenants are too far ahead of the others.

As in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): every tenant has a counter of the service
that it got; here in predicted seconds of the work that was computed, so that cached tokens are free. A tenant that
returns is lifted to the least served active one: nothing is saved up by being away. Unlike there the least served one
does not go first: only those that are more than a limit ahead of it go last.
"""

from headrace.scheduler.policies.lazy_heap import LazyHeap


class Tenants:
    """Service counters of the tenants that have requests queued, and of those that have had meanwhile."""

    def __init__(self, lag_s: float) -> None:
        """lag_s: seconds of service by which a tenant may be ahead."""
        self._lag = round(lag_s * 1e6)
        self._queued: dict[str, int] = {}  # requests, by tenant
        self._served: dict[str, int] = {}  # microseconds: whole numbers, whose sums do not depend on their order
        self._active: LazyHeap[str, str] = LazyHeap()

    def join(self, tenant: str) -> None:
        """A request of the tenant is queued."""
        queued = self._queued.get(tenant, 0)
        self._queued[tenant] = queued + 1
        if not queued:
            self._served[tenant] = max(self._served.get(tenant, 0), self._least())
            self._activate(tenant)

    def leave(self, tenant: str) -> None:
        """A request of the tenant is queued no more. Raises KeyError when none was."""
        self._queued[tenant] -= 1
        if self._queued[tenant]:
            return
        del self._queued[tenant]
        self._active.remove(tenant)
        if not self._queued:
            self._served.clear()  # while all are served at once, none is ahead
        elif self._served[tenant] <= self._least():
            del self._served[tenant]  # when it returns, it is lifted to more than that

    def charge(self, tenant: str, seconds: float) -> None:
        """Work of a queued request was planned. Raises KeyError for a tenant without one."""
        self._served[tenant] += round(seconds * 1e6)
        self._activate(tenant)

    def ahead(self, tenant: str) -> bool:
        """The tenant is more than the limit ahead of the least served one that has requests queued."""
        return len(self._queued) > 1 and self._served[tenant] - self._least() > self._lag

    def _activate(self, tenant: str) -> None:
        self._active.put(tenant, (self._served[tenant], tenant), tenant)

    def _least(self) -> int:
        first = self._active.first()
        return 0 if first is None else int(first[0][0])
