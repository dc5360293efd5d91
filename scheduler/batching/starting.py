"""Starting requests: a request that waits gets its pages, and is computed or fetched from then on.

The oldest one that lacks pages has a claim to them. Without it, a request that needs many pages would wait for ever
while shorter ones take each page that is freed. All pages that are in use now come free some day. So the oldest request
gets its pages in the end if those that were started after it was refused never hold more than the rest of the pool:

    pool  ├──── kept for the claimant ────┤── others, started since ──┤

The rest of the pool goes on serving short prompts meanwhile.
"""

from functools import partial

from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

LOOKED_AT = 32
"""Waiting requests that may be found not to fit before the search ends."""


class PageClaim:
    """The claim of the oldest request that was refused to the pages and the metadata row that it lacks; at most one."""

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


class Starter:
    """Leases pages and metadata rows to the requests of a replica that wait.

    A strict policy (fcfs) starts them in order of arrival: the first that does not fit is waited for. Under another
    one they are passed over, and pages are kept for the oldest (see PageClaim).
    """

    def __init__(self, state: State, replica: Replica, fetch: RemoteFetch) -> None:
        self._state = state
        self._replica = replica
        self._fetch = fetch
        self._claim = PageClaim()
        self._refused: tuple[int, int, int] | None = None  # the attempt that failed last, where one is made at a time
        self._no_fetch: tuple[int, int, int] | None = None  # what there was when no fetch could be started

    def start_next(self, now: float, fetches_only: bool) -> Request | None:
        """Start the fetches that come first in order, and the prefill behind them; None when it does not fit now."""
        self._start_strictly_fetches(now)
        head, limit = self._head(), self._state.config.max_running
        if fetches_only or head is None or head.to_fetch or self._replica.queues.rows >= limit:
            return None
        return head if self._attempt(head, now) else None

    def start_fetches(self, now: float) -> None:
        """Start to fetch what is next, and fits. Costs nothing where nothing has changed since."""
        state, replica, queues = self._state, self._replica, self._replica.queues
        if not state.engine.ready or not queues.to_fetch:
            return
        if queues.to_fetch.strict:
            self._start_strictly_fetches(now)
            return
        before = (replica.cache.version, state.metadata_rows.free, len(queues.to_fetch))
        if before == self._no_fetch:
            return
        oldest = next(queues.to_fetch.by_age(started=False))
        if not self._start_fetch(oldest, now):
            self._claim.refused(oldest)
        left = LOOKED_AT
        for request in queues.to_fetch.order(now):
            if not left:
                break
            left -= not self._start_fetch(request, now)
        self._no_fetch = (replica.cache.version, state.metadata_rows.free, len(queues.to_fetch))

    def start(self, request: Request, now: float) -> bool:
        """Start to compute a request, unless that would delay an older one that lacks pages."""
        state, replica = self._state, self._replica
        if request.decodes_here and len(replica.queues.decoding) >= state.config.max_running:
            return False
        if replica.pages_lacking(request) > 0:
            self._fetch.make_way(replica, now)
        if replica.pages_lacking(request) > 0 or not self._allowed(request):
            return False
        return self._lease(request, now)

    def refused(self, request: Request) -> None:
        """The oldest request that waits to be computed could not be started: keep pages for it."""
        if not request.gives_way:
            self._claim.refused(request)

    def _head(self) -> Request | None:
        return next(self._replica.queues.policy.by_age(started=False), None)

    def _start_strictly_fetches(self, now: float) -> None:
        while (head := self._head()) is not None and head.to_fetch and self._attempt(head, now):
            pass

    def _attempt(self, head: Request, now: float) -> bool:
        """Start the head; remember when it does not fit, so that it is not tried again before something has changed."""
        attempt = (head.serial, self._replica.cache.version, self._state.metadata_rows.free)
        if attempt == self._refused:
            return False
        if self._fetch.start(head, now) if head.to_fetch else self._lease(head, now):
            return True
        self._refused = attempt
        return False

    def _start_fetch(self, request: Request, now: float) -> bool:
        if request.phase is not Phase.WAITING:
            return True  # it has been started as the oldest
        if not self._allowed(request) or not self._fetch.start(request, now):
            return False
        self._claim.started(request)
        return True

    def _allowed(self, request: Request) -> bool:
        state, replica, claimant = self._state, self._replica, self._claim.claimant
        if claimant is None:
            return True
        rest = replica.cache.total - replica.cache.pages_for(claimant.target)
        if not self._claim.allows(request, replica.cache.pages_for(request.target), rest):
            return False
        return (
            not _needs_row(claimant)
            or not _needs_row(request)
            or self._claim.allows_row(request, state.metadata_rows.total)
        )

    def _lease(self, request: Request, now: float) -> bool:
        """Lease pages for all that is to be computed, and a metadata row if the request's peer has reserved; False when
        they are not free now. Both or none: two requests that each had one and waited for the other would block
        each other."""
        state, replica, counters = self._state, self._replica, self._state.metrics.counters
        needs_row = _needs_row(request)
        if needs_row and not state.metadata_rows.free:
            return False
        acquire = partial(
            replica.cache.acquire,
            request.tokens,
            request.salt,
            request.images,
            cacheable=request.cacheable,
            load=partial(state.loads, replica),
            tenant=request.terms.tenant,
            keep=request.terms.keep_tokens,
        )
        lease = acquire()
        if lease is None and self._fetch.make_way(replica, now):
            lease = acquire()
        if lease is None:
            return False
        request.lease = lease
        self._fetch.leased(request)
        if needs_row:
            request.row = state.metadata_rows.allocate(1, request.arrival)[0]
        cached = lease.matched * state.config.page_size
        request.queued.expected_cached = 0
        replica.queues.plan(request, cached)
        request.computed = cached
        if not request.preempted:
            request.cached_tokens, request.from_tiers = cached, lease.from_tiers(state.config.page_size)
            counters.add("prompt_tokens_total", request.prompt_tokens)
            counters.add("cached_tokens_total", cached)
        state.enter(request, Phase.RUNNING, now)
        self._claim.started(request)
        return True


def _needs_row(request: Request) -> bool:
    return request.outgoing is not None or request.to_fetch
