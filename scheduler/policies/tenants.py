"""What each tenant has been served, and which tenants are too far ahead of the others.

As in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): every tenant has a counter of the service
that it got; here in predicted seconds of the work that was computed, so that cached tokens are free. Unlike there the
least served one does not go first: only those that are more than a limit ahead of it go last. And a tenant that returns
is not lifted to the least served active one, but to some seconds below it (here two limits):

    clock - 2 limits      clock - limit                clock: the most that the least served active tenant has had
          │  goes first: others │  comes in the order of    │
          │  are too far ahead  │  the policy, as others do │

So a tenant that wants little is served at once beside one that wants all, whose prompts may be shorter and would come
first under srpt. It cannot save up more than that by being away, and what it was served it keeps on its counter.

There are tenants at two levels: the names of API keys; below requests without one, their cache salts.

    names of keys:   alice │ bob │ "" ── salts of requests without a name:   "" │ a │ b

A client may send a salt with every request that no other has, or the salt or name of another tenant. So all requests
without a name are together one tenant beside those with a name, and what a salt has been served counts among salts
alone. A salt that is new begins where the least served one is, not below it.
"""

from headrace.core.lazy_heap import LazyHeap
from headrace.scheduler.requests.record import Request

FORGOTTEN = 4096
"""Counters that are kept of tenants without requests queued; of more than so many the lower half is forgotten."""
RETURN_LAGS = 2
"""Limits by which a tenant that returns is below the least served active one."""


class Tenants:
    """Service counters of the tenants that have requests queued, and of those that have had meanwhile."""

    def __init__(self, lag_s: float, return_s: float) -> None:
        """Seconds of service.

        lag_s: by which a tenant may be ahead.
        return_s: by which one that returns is below the least served active one at most.
        """
        self._lag = round(lag_s * 1e6)
        self._return = round(return_s * 1e6)
        self._queued: dict[str, int] = {}  # requests, by tenant
        self._served: dict[str, int] = {}  # microseconds: whole numbers, whose sums do not depend on their order
        self._active: LazyHeap[str, str] = LazyHeap()
        self._clock = 0

    def join(self, tenant: str) -> None:
        """A request of the tenant is queued."""
        queued = self._queued.get(tenant, 0)
        self._queued[tenant] = queued + 1
        if not queued:
            self._served[tenant] = max(self._served.get(tenant, 0), self._floor())
            self._activate(tenant)

    def leave(self, tenant: str) -> None:
        """A request of the tenant is queued no more. Raises KeyError when none was."""
        self._queued[tenant] -= 1
        if self._queued[tenant]:
            return
        del self._queued[tenant]
        self._active.remove(tenant)
        if self._served[tenant] <= self._floor():
            del self._served[tenant]  # when it returns, it is lifted to that or more
        if len(self._served) - len(self._queued) > FORGOTTEN:
            self._forget()

    def charge(self, tenant: str, seconds: float) -> None:
        """Work of a queued request was planned. Raises KeyError for a tenant without one."""
        self._served[tenant] += round(seconds * 1e6)
        self._activate(tenant)

    def ahead(self, tenant: str) -> bool:
        """The tenant is more than the limit ahead of the least served one that has requests queued."""
        return len(self._queued) > 1 and self._served[tenant] - self._least() > self._lag

    def _floor(self) -> int:
        """What a tenant that returns has at least."""
        return max(0, self._clock - self._return)

    def _forget(self) -> None:
        away = sorted((served, tenant) for tenant, served in self._served.items() if tenant not in self._queued)
        for _, tenant in away[: len(away) // 2]:
            del self._served[tenant]

    def _activate(self, tenant: str) -> None:
        self._active.put(tenant, (self._served[tenant], tenant), tenant)
        self._clock = max(self._clock, self._least())

    def _least(self) -> int:
        first = self._active.first()
        return 0 if first is None else int(first[0][0])


class TenantLevels:
    """Which requests are of tenants that are too far ahead of others."""

    def __init__(self, lag_s: float) -> None:
        """lag_s: seconds of service by which a tenant may be ahead of others of its level."""
        self._names = Tenants(lag_s, RETURN_LAGS * lag_s)
        self._salts = Tenants(lag_s, 0.0)

    def join(self, request: Request) -> None:
        """It is queued."""
        self._names.join(request.terms.tenant)
        if not request.terms.tenant:
            self._salts.join(request.terms.cache_salt)

    def leave(self, request: Request) -> None:
        """It is queued no more. Raises KeyError for a tenant without requests queued."""
        self._names.leave(request.terms.tenant)
        if not request.terms.tenant:
            self._salts.leave(request.terms.cache_salt)

    def charge(self, request: Request, seconds: float) -> None:
        """Work of it was planned. Raises KeyError for a tenant without requests queued."""
        self._names.charge(request.terms.tenant, seconds)
        if not request.terms.tenant:
            self._salts.charge(request.terms.cache_salt, seconds)

    def groups(self, request: Request) -> tuple[str, ...]:
        """Names of what it belongs to: its key, and the salt if the key has no name."""
        submit = request.submit
        return (f"key {submit.terms.tenant}",) if submit.terms.tenant else ("key ", f"salt {submit.terms.cache_salt}")

    def ahead(self, request: Request) -> tuple[int, str]:
        """How far its groups are ahead of others of their levels: 0, 1 (its salt), 2 (its key) or 3 (both). And the
        last of its groups that is; "" for none."""
        submit = request.submit
        key = 2 * self._names.ahead(submit.terms.tenant)
        if not submit.terms.tenant and self._salts.ahead(submit.terms.cache_salt):
            return key + 1, self.groups(request)[-1]
        return key, self.groups(request)[0] if key else ""
