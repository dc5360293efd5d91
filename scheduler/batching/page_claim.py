"""The claim of the oldest waiting request to the pages and the metadata row that it lacks.

Without it, a request that needs many pages would wait for ever while shorter ones take each page that is freed. All
pages that are in use now come free some day. So the oldest request gets its pages in the end if those that were started
after it was refused never hold more than the rest of the pool:

    pool  ├──── kept for the claimant ────┤── others, started since ──┤

The rest of the pool goes on serving short prompts meanwhile.
"""

from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request


class PageClaim:
    """At most one request has a claim: the oldest that was refused."""

    def __init__(self) -> None:
        self._claimant: Request | None = None
        self._since: list[Request] = []  # started after the claimant was refused

    @property
    def claimant(self) -> Request | None:
        """The request that pages are kept for."""
        if self._claimant is not None and self._claimant.phase is not Phase.WAITING:
            self._claimant = None  # it was started, or has ended
            self._since.clear()
        return self._claimant

    def refused(self, request: Request) -> None:
        """The oldest request of those that wait for the same has been refused."""
        claimant = self.claimant
        if claimant is None or request.arrival < claimant.arrival:
            self._claimant = request
            self._since.clear()

    def allows(self, request: Request, pages: int, kept: int) -> bool:
        """Whether a request may take so many pages. kept: pages of the pool less those that the claimant needs."""
        claimant = self.claimant
        if claimant is None or request.arrival <= claimant.arrival:
            return True
        self._since = [started for started in self._since if started.lease is not None]
        return pages + sum(len(started.lease.pages) for started in self._since if started.lease) <= kept

    def allows_row(self, request: Request, total: int) -> bool:
        """Whether a request may take a metadata row, of so many in all."""
        claimant = self.claimant
        if claimant is None or request.arrival <= claimant.arrival:
            return True
        return sum(started.row is not None for started in self._since) < total - 1

    def started(self, request: Request) -> None:
        """A request has taken pages."""
        if self.claimant is not None:
            self._since.append(request)
