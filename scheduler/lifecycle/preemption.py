"""Preemption: requests give up their KV pages for others and wait again, with what they have computed in the prefix
cache.

    decoding, and the pool is full          the latest arrival ─► WAITING, computed again with all its tokens
      its KV came from a prefill server     … and fetched again, as that may still have it in its prefix cache;
                                            computed here if that fails, or is not worth it (decode/fetch.py)
    optimistic, and a prompt whose peer has
    come lacks pages                        the latest arrival ─► BOOTSTRAP, computed again once its peer has come
"""

from headrace.core.types import refusals
from headrace.core.types.packed import prompt_hash
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class Preemption:
    """Takes the pages of requests, once their plans in flight are done."""

    def __init__(self, state: State, completion: Completion) -> None:
        self._state = state
        self._completion = completion

    def preempt(self, request: Request, now: float) -> None:
        """Send a request back to the queue, once its plans in flight are done."""
        replica = self._state.of(request)
        replica.queues.preempt(request)
        if request.early_prefill:
            request.early_prefill = False
            replica.held.remove(request)
        self._state.metrics.counters.add("preemptions_total")
        self.requeue_if_due(request, now)

    def requeue_if_due(self, request: Request, now: float) -> None:
        """Have a preempted request wait again, if no plan in flight needs its pages."""
        if request.in_flight == 0 and request.arrival in self._state.of(request).queues.preempting:
            self._requeue(request, now)

    def make_way(self, replica: Replica, now: float) -> None:
        """Where the first request that waits lacks pages, preempt prompts whose peer has not come, the latest arrivals
        first; none if all of theirs are not enough."""
        queues, held = replica.queues, replica.held
        if not self._state.config.optimistic_start or not held:
            return
        first = next((request for request in queues.policy.order(now) if request.phase is Phase.WAITING), None)
        if first is None or first.gives_way or first.to_fetch:
            return
        queues.look_up(first, now)
        lacking = replica.pages_lacking(first) - sum(map(_pages, queues.preempting.values()))
        if not 0 < lacking <= held.pages:
            return
        if replica.moves or replica.loads_for_none:  # those free pages soon
            self._completion.end_moves(replica, refusals.PAGES_NEEDED.error(), now)
            return
        victims: list[Request] = []
        for request in sorted(filter(_repeatable, held), key=lambda request: request.arrival, reverse=True):
            if lacking > 0 and request.lease is not None:
                victims.append(request)
                lacking -= _pages(request)
        for victim in victims if lacking <= 0 else ():
            self.preempt(victim, now)

    def restart(self, now: float) -> None:
        """Have requests begin again whose KV was to be fetched again, and does not come."""
        state = self._state
        for request in state.starting_over.values():
            if request.starts_over:
                self._requeue(request, now)
        state.starting_over.clear()

    def _requeue(self, request: Request, now: float) -> None:
        """Free the pages, and have the request start again with all its tokens as the prompt.

        Fetched KV that has not been computed with yet is published first, so that it need not be computed here.
        """
        state = self._state
        if request.lease is not None:
            state.of(request).cache.publish(request.lease, request.tokens, request.computed)
        self._completion.free_pages(request)
        request.preempted, request.kept = True, request.computed
        state.requests.renumber(request)
        state.unacknowledged.remove(request)
        match request.route:
            case SendTo():
                request.forget_first_token()
            case FetchFrom() as route:
                self._choose_source(request, route)
        state.of(request).queues.requeue(request)
        if not request.to_fetch:
            state.rebind(request)
        awaits_peer = isinstance(request.route, SendTo) and request.outgoing is None
        state.enter(request, Phase.BOOTSTRAP if awaits_peer else Phase.WAITING, now)

    def _choose_source(self, request: Request, route: FetchFrom) -> None:
        """Whether the KV of a request that was fetched is asked for again at its prefill server. The ticket is another
        one, as each is used once."""
        state = self._state
        request.fetched = request.handoff(state.config.page_size)
        state.prefills.end_fetch(request)
        request.incoming = None
        if request.images or state.prefills.session(route.prefill, request.replica) is None:
            request.computes_here = True
        if not request.computes_here:
            name = prompt_hash(f"{route.ticket} {request.serial}".encode())
            request.route = FetchFrom(route.prefill, name)


def _pages(request: Request) -> int:
    return 0 if request.lease is None else len(request.lease.pages)


def _repeatable(request: Request) -> bool:
    """An optimistic prompt that can be computed again: the client has got nothing of it that would come twice."""
    sampling = request.submit.sampling
    return request.gives_way and sampling.prompt_logprobs is None and sampling.hidden_states is None
