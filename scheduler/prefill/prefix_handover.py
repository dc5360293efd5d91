"""Prefixes that are handed over from the prefix cache: what is in tiers is loaded as for a prompt, nothing is computed.

Submit(SendTo.cached) ─► WAITING ─► lease ─► INFLIGHT ─► loaded ─► sent like any other ticket
                            │                              └─ a page cannot be loaded: not_cached, with what is left
                            ├─ not all is held: not_cached
                            ├─ no room while pages are being copied: it waits for them
                            └─ no room: pages_needed

It takes pages that are free or cached, and none that the oldest request that waits needs. It gives up its own to any
request that lacks some (Completion.end_moves()).
"""

from headrace.core.types import refusals
from headrace.core.types.errors import NOT_CACHED, ErrorInfo
from headrace.scheduler.kv.kv_cache import Lease
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class PrefixHandover:
    """Leases the pages of prefixes that peers fetch, and has them loaded."""

    def __init__(self, state: State, completion: Completion, handoff: KvHandoff) -> None:
        self._state = state
        self._completion = completion
        self._handoff = handoff

    def start(self, request: Request, now: float) -> None:
        """Lease the pages of a request that waits; fail it where that is not possible soon."""
        state, replica = self._state, self._state.of(request)
        pool, in_tiers = replica.cache.held(request.tokens, request.salt, request.images)
        if pool + in_tiers.total < request.target:
            self._not_cached(request, pool + in_tiers.total, now)
            return
        lease = self._lease(request, replica, in_tiers.total)
        if lease is None:
            if not replica.cache.copying:
                self._completion.fail(request, refusals.PAGES_NEEDED.error(), now)
            return
        request.found(lease, state.config.page_size)
        state.enter(request, Phase.INFLIGHT, now)
        if request.outgoing is not None:
            state.awaiting_row[request.arrival] = request
            state.count_unacknowledged(request, now)

    def resume(self, replica: Replica, now: float) -> None:
        """A copy of pages has ended: try those that wait for one again."""
        for request in list(replica.queues.to_hand_over.values()):
            self.start(request, now)

    def loaded(self, request: Request, now: float) -> None:
        """All of its KV is in the pool: send it, if its peer has reserved and there was a metadata row."""
        if request.row is not None:
            self._handoff.send_all(request, now)

    def not_loaded(self, request: Request, good_pages: int, now: float) -> None:
        """A page could not be loaded, or was not what had been stored. good_pages: those before it."""
        self._not_cached(request, good_pages * self._state.config.page_size, now)

    def _lease(self, request: Request, replica: Replica, to_load: int) -> Lease | None:
        """None where there is no room. to_load: tokens in tiers."""
        cache, queues = replica.cache, replica.queues
        pages = cache.pages_for(to_load)
        oldest = (next(queue.by_age(started=False), None) for queue in (queues.policy, queues.to_fetch))
        if pages and any(one is not None and replica.pages_lacking(one) + pages > 0 for one in oldest):
            return None
        return cache.acquire_held(request.tokens, request.salt, request.images, request.terms.tenant)

    def _not_cached(self, request: Request, cached: int, now: float) -> None:
        text = f"the prefix cache has {cached} of the {request.target} tokens"
        self._completion.fail(request, ErrorInfo(code=NOT_CACHED, message=text, status=412, field="cached_only"), now)
