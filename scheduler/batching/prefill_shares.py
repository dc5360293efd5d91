"""How a forward pass is shared by several prompts, under a policy that is not strict.

1. the reserve, a set share of the budget: to the oldest requests that can run, in order of arrival
2. the rest: in the policy's order, each to its end
3. what is left when too many in the order do not fit: to half-done requests, which can always run

Where a plan has one row, the reserve would leave none for the order: it is saved up, and is a whole plan then.

So a request gets its part of each plan as soon as no older one wants it, whatever comes later; and no budget is left
while a half-done request has tokens, with one exception: a pass in which prompts end, so that first tokens wait for its
end, is filled up with others only where enough of them wait for that to pay (CostModel.worth_filling).
"""

import heapq
from collections.abc import Iterable
from itertools import islice
from math import ceil

from headrace.scheduler.batching.starting import LOOKED_AT, Starter
from headrace.scheduler.costs.chunking import chunk_length
from headrace.scheduler.costs.cost_model import Load
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State


class PrefillShares:
    """Divides the budget of one plan at a time."""

    def __init__(self, state: State, replica: Replica, starter: Starter) -> None:
        self._state = state
        self._replica = replica
        self._starter = starter
        self._budget = 0
        self._slots = 0
        self._counts: dict[Request, int] = {}  # tokens
        self._used: dict[Request, int] = {}  # of the budget
        self._refused: set[int] = set()
        self._ends = 0  # prompts whose last part is in the plan
        self._saved = 0  # tokens of the reserve, of plans with one row

    @property
    def divided(self) -> Iterable[Request]:
        """The requests that got a part of the last plan."""
        return self._counts

    def divide(self, budget: int, slots: int, now: float) -> Iterable[tuple[Request, int]]:
        """Requests and the tokens that each of them has in the plan, at most slots of them. Starts those that wait."""
        self._budget, self._slots = budget, slots
        self._counts, self._used, self._refused = {}, {}, set()
        self._ends = 0
        if budget > 0 and slots > 0 and self._replica.queues.policy:
            self._replica.queues.renew_keys(now)
            self._reserve(now)
            self._in_order(now)
        return self._counts.items()

    def _reserve(self, now: float) -> None:
        """Give the reserve to the oldest requests that can run, and keep pages for the oldest that cannot."""
        queues, policy = self._replica.queues, self._replica.queues.policy
        left = ceil(self._budget * self._state.config.policy_reserve)
        if self._slots == 1:
            left = self._save(left)
        if left <= 0:
            return
        waiting = islice(policy.by_age(started=False), LOOKED_AT)
        for request in heapq.merge(policy.by_age(started=True), waiting, key=lambda request: request.arrival):
            if left <= 0 or self._budget <= 0:
                return
            if request.gives_way:
                continue
            if request.phase is Phase.WAITING:
                queues.look_up(request, now)
                if not self._start(request, now):
                    self._starter.refused(request)
                    continue
            left -= self._give(request, left)

    def _save(self, tokens: int) -> int:
        """Tokens of the reserve for a plan with one row: all of its budget, or none."""
        self._saved += tokens
        if self._saved < self._budget:
            return 0
        self._saved -= self._budget
        return self._budget

    def _in_order(self, now: float) -> None:
        """Give what the reserve has left to the best ones, passing over those that do not fit."""
        queues = self._replica.queues
        looked_at = LOOKED_AT
        for request in queues.policy.order(now):
            if self._closed_to(request):
                return
            if not looked_at:
                break
            if request.phase is not Phase.WAITING:
                self._give(request, self._budget)
            elif queues.look_up(request, now):
                looked_at -= 1  # it comes up again at its place
            elif self._start(request, now):
                self._give(request, self._budget)
            else:
                looked_at -= 1
        for request in queues.policy.by_age(started=True):
            if self._closed_to(request):
                return
            self._give(request, self._budget)

    def _start(self, request: Request, now: float) -> bool:
        """Start a request, at most one attempt a plan."""
        if len(self._counts) >= self._slots or request.arrival in self._refused:
            return False
        if self._starter.start(request, now):
            return True
        self._refused.add(request.arrival)
        return False

    def _give(self, request: Request, budget: int) -> int:
        """Give a request what it can use of this budget, beside what it has; returns what that takes of it."""
        if not request.has_kv:
            return 0  # its cached pages are being loaded
        left, had = request.target - request.planned, self._used.get(request, 0)
        if self._counts.get(request) == left or (request not in self._counts and len(self._counts) >= self._slots):
            return 0
        count, used = next_chunk(self._state, request, min(budget, self._budget) + had)
        self._counts[request], self._used[request] = count, used
        self._ends += count == left
        self._budget -= used - had
        return used - had

    def _closed_to(self, request: Request) -> bool:
        """Whether no budget is left, or the request does not end in this pass and is not worth filling it up with."""
        left = request.load.tokens
        if self._budget <= 0 or left <= self._budget:
            return self._budget <= 0
        start = request.target - left
        part = Load.between(start, start + self._budget)
        others = len(self._replica.queues.policy) - self._ends
        return not self._replica.costs.worth_filling(self._ends, others, part)


def next_chunk(state: State, request: Request, budget: int) -> tuple[int, int]:
    """Tokens of a request's next chunk, as many as the budget allows, and what they take of the budget. A chunk that is
    shorter because it follows a long prefix, and takes as long as a full one, uses up as much of it."""
    config = state.config
    length = chunk_length(state.engine.costs, request.planned, config.chunk_tokens, config.page_size)
    full = max(1, budget * length // config.chunk_tokens)
    count = min(full, request.target - request.planned)
    return count, budget * count // full
