"""Tenants at two levels: the names of API keys; below requests without one, their cache salts.

    names of keys:   alice │ bob │ "" ── salts of requests without a name:   "" │ a │ b

A client may send a salt with every request that no other has, or the salt or name of another tenant. So all requests
without a name are together one tenant beside those with a name, and what a salt has been served counts among salts
alone. A salt that is new begins where the least served one is, not below it.
"""

from headrace.scheduler.policies.tenants import Tenants
from headrace.scheduler.requests.record import Request

RETURN_LAGS = 2
"""Limits by which a tenant that returns is below the least served active one."""


class TenantLevels:
    """Which requests are of tenants that are too far ahead of others."""

    def __init__(self, lag_s: float) -> None:
        """lag_s: seconds of service by which a tenant may be ahead of others of its level."""
        self._names = Tenants(lag_s, RETURN_LAGS * lag_s)
        self._salts = Tenants(lag_s, 0.0)

    def join(self, request: Request) -> None:
        """It is queued."""
        self._names.join(request.submit.tenant)
        if not request.submit.tenant:
            self._salts.join(request.submit.cache_salt)

    def leave(self, request: Request) -> None:
        """It is queued no more. Raises KeyError for a tenant without requests queued."""
        self._names.leave(request.submit.tenant)
        if not request.submit.tenant:
            self._salts.leave(request.submit.cache_salt)

    def charge(self, request: Request, seconds: float) -> None:
        """Work of it was planned. Raises KeyError for a tenant without requests queued."""
        self._names.charge(request.submit.tenant, seconds)
        if not request.submit.tenant:
            self._salts.charge(request.submit.cache_salt, seconds)

    def groups(self, request: Request) -> tuple[str, ...]:
        """Names of what it belongs to: its key, and the salt if the key has no name."""
        submit = request.submit
        return (f"key {submit.tenant}",) if submit.tenant else ("key ", f"salt {submit.cache_salt}")

    def ahead(self, request: Request) -> tuple[int, str]:
        """How far its groups are ahead of others of their levels: 0, 1 (its salt), 2 (its key) or 3 (both). And the
        last of its groups that is; "" for none."""
        submit = request.submit
        key = 2 * self._names.ahead(submit.tenant)
        if not submit.tenant and self._salts.ahead(submit.cache_salt):
            return key + 1, self.groups(request)[-1]
        return key, self.groups(request)[0] if key else ""
