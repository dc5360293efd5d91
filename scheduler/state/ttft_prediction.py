"""The predicted time to first token of a request that arrives: what goes before it, and what comes meanwhile.

    A   seconds of work ahead of it in the order of the policy
    B   seconds of the other queued work, of which the oldest request gets the reserve φ of every plan
    ρ   share of the time that later arrivals take which go ahead of it, at most 0.9

    wait = A / (1 - φ - ρ)     while B lasts; once it is done, (A + B) / (1 - ρ)
           (A + B + own) / φ   at the latest, since it then is the oldest itself

To this come the plans in flight, and what fills up the last plan with it. Its own work is done at the same pace, except
that under srpt fewer arrivals go ahead of it the less it has left.
Under fcfs nothing comes ahead: the wait is all that is queued. Not modelled: pages and peers that are waited for,
decode rows, tenants that are ahead of others; under slo, objectives that were set earlier, are longer, and end sooner.
"""

from collections.abc import Sequence, Sized
from math import ceil
from typing import NamedTuple

from headrace.core.config import SchedulerConfig
from headrace.scheduler.costs.backlog import ArrivingWork, Backlog, Rank, lower_edge, rank_of
from headrace.scheduler.costs.cost_model import CostModel, Load
from headrace.scheduler.state.plan_table import PlanTable

RHO_LIMIT = 0.9
"""Above a load of 1 no time is long enough: predictions and retry times are for this load."""


REDIRECTED_RHO = 0.5
"""The most that later arrivals are taken to make a queue longer where it is asked whom a prompt delays: while it lasts,
clients that compare costs send theirs elsewhere."""


class Prediction(NamedTuple):
    """What a request may expect at its arrival. Seconds are rounded to microseconds."""

    ttft_s: float
    """Seconds to its first token."""

    alone_s: float
    """The same if nothing else were queued, running or to come."""

    queued_s: float
    """Seconds of all the work that is queued or running."""

    delayed: float
    """Requests whose first token comes later by the seconds of its work: those that wait and go behind it, and those
    that are expected to, until nothing waits."""

    rho: float
    """Share of the time that arrivals take which are ranked as this one or before it: by so much slower a queue of them
    gets shorter. Refused ones count, since they come again. At most RHO_LIMIT."""

    def retry_after_s(self, excess_s: float) -> float:
        """Seconds in which that much work is done, given what arrives meanwhile."""
        return rounded(excess_s / (1 - self.rho))


class TtftPredictor:
    """Predicts from sums by rank: O(ranks in use), however many requests wait. Pure and deterministic."""

    def __init__(
        self, config: SchedulerConfig, costs: CostModel, backlog: Backlog, queued: Sized, plans: PlanTable
    ) -> None:
        """queued: the requests of the backlog."""
        self._costs = costs
        self._backlog = backlog
        self._queued = queued
        self._plans = plans
        self._rank_of = rank_of(config.policy)
        self._by_work = config.policy == "srpt"
        self._reserve = 0.0 if config.policy == "fcfs" else config.policy_reserve
        self._chunk = config.chunk_tokens
        self._reserved = ceil(self._chunk * self._reserve)  # tokens of a pass for the oldest request
        self._arriving = ArrivingWork()
        self._offered = ArrivingWork()  # the refused included
        self._requests = ArrivingWork()  # in requests a second

    def predict(self, priority: int, objective_s: float | None, load: Load, start: int, now: float) -> Prediction:
        """Predict for a request that arrives. load: what is to be computed of it, from position start on."""
        costs, work_s = self._costs, self._costs.load_s(load)
        rank = self._rank_of(priority, objective_s, costs.key_s(load))
        ahead, total = self._backlog.ahead(rank), self._backlog.total()
        ahead_s, total_s = costs.load_s(ahead), costs.load_s(total)
        behind_s = max(0.0, total_s - ahead_s)
        running_s = self._running_s(now)
        first = Load.between(start, start + min(load.tokens, self._chunk))
        fill_s, last_s = costs.fill_s(first), costs.last_pass_s(load.tokens)
        if behind_s > 0:
            filled = self._fills_up()
            shared = self._shared_tokens(ahead.tokens + load.tokens) if filled else self._reserved
            shared_s = min(behind_s, shared * behind_s / (total.tokens - ahead.tokens))
            last_s = shared_s if filled else last_s + shared_s
        before = self._arriving.before_level(rank.level, now)
        own = self._arriving.own_level(rank, now)
        wait_s = wait_and_work_s(
            ahead_s=ahead_s,
            behind_s=behind_s,
            work_s=work_s,
            reserve=self._reserve,
            shares=_shares(before, own, self._by_work),
        )
        return Prediction(
            ttft_s=rounded(max(running_s, fill_s) + wait_s + last_s),
            alone_s=rounded(fill_s + work_s + last_s),
            queued_s=rounded(running_s + total_s),
            delayed=self._delayed(rank, running_s + total_s + work_s, now),
            rho=round(min(self._offered.share(rank, now, equal=True), RHO_LIMIT), 6),
        )

    def arrived(self, priority: int, objective_s: float | None, load: Load, now: float, *, admitted: bool) -> None:
        """A request with so much to compute has arrived, and was admitted or refused."""
        if load.tokens:
            costs = self._costs
            rank, seconds = self._rank_of(priority, objective_s, costs.key_s(load)), costs.load_s(load)
            if not self._fills_up():
                seconds += costs.last_pass_s(load.tokens)
            self._offered.add(rank, seconds, now)
            if admitted:
                self._arriving.add(rank, seconds, now)
                self._requests.add(rank, 1.0, now)

    def _delayed(self, rank: Rank, busy_s: float, now: float) -> float:
        """Requests that work of this rank delays. busy_s: seconds of all that is to be computed, with it."""
        rho = min(self._arriving.total(now), REDIRECTED_RHO)
        return rounded(self._backlog.behind(rank) + self._requests.from_rank_on(rank, now) * busy_s / (1 - rho))

    def _fills_up(self) -> bool:
        """Whether the last pass of a prompt is filled up with others."""
        full = Load.between(0, self._chunk)
        return not self._reserve or self._costs.worth_filling(1, len(self._queued), full)

    def _shared_tokens(self, tokens: int) -> int:
        """Tokens of those behind in the last of the passes over so many, which they fill up."""
        return -tokens % max(1, self._chunk - self._reserved)

    def _running_s(self, now: float) -> float:
        """Seconds until the plans in flight are done, as the slowest stage has them."""
        plans = [plan for plan in self._plans if not plan.gives_way]
        seconds = sum(self._costs.load_s(plan.load) + self._costs.last_pass_s(plan.tokens) for plan in plans)
        first = plans[0] if plans else None
        if first is None:
            return 0.0
        first_s = self._costs.load_s(first.load) + self._costs.last_pass_s(first.tokens)
        return rounded(seconds - min(max(0.0, now - first.begun), first_s))


class Pace(NamedTuple):
    """Arrivals that go ahead of a request while it has less left than some work."""

    work_s: float
    """Seconds of work left."""

    rho: float
    """Share of the time that arrivals take which go ahead of it then."""


def wait_and_work_s(*, ahead_s: float, behind_s: float, work_s: float, reserve: float, shares: Sequence[Pace]) -> float:
    """Seconds until a request is computed that has so much work ahead of it, behind it and left.

    shares: ascending; the last one is that of the whole request. Raises IndexError when there is none.
    """
    rho = min(shares[-1].rho, RHO_LIMIT)
    found = (ahead_s + behind_s) / (1 - rho)
    if (rest := 1 - reserve - rho) > 0:
        found = min(found, ahead_s / rest) if behind_s > 0 else ahead_s / (1 - rho)
    done = 0.0
    for pace in shares:
        found += max(0.0, min(pace.work_s, work_s) - done) / (1 - min(pace.rho, RHO_LIMIT))
        done = max(done, min(pace.work_s, work_s))
    found += max(0.0, work_s - done) / (1 - rho)
    return min(found, (ahead_s + behind_s + work_s) / reserve) if reserve > 0 else found


def rounded(seconds: float) -> float:
    """To microseconds."""
    return round(seconds, 6)


def _shares(before: float, own: Sequence[tuple[int, float]], by_work: bool) -> list[Pace]:
    """How the arrivals that go ahead grow with the work that is left."""
    found, rho = [], before
    for bucket, share in own:
        if by_work and share > 0:
            found.append(Pace(lower_edge(bucket + 1), rho))
        rho += share
    found.append(Pace(float("inf"), rho))
    return found
