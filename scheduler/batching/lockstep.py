"""Passes of lockstep replicas: one draft for each replica, one agreement, one Forward with one number to each of them.

    draft 0 ─► vote ─┐                    ┌─► Forward 7  rows of replica 0, agreement
    draft 1 ─► vote ─┼─► coordinate() ────┼─► Forward 7  rows of replica 1, agreement
    draft 2 ─► vote ─┘                    └─► Forward 7  (),                agreement      replica 2 is idle

Replicas that share collectives (expert parallelism) have to take part in each pass, or the others wait for ever.
"""

from collections.abc import Sequence
from math import inf

from headrace.core.types.ranks.coordinate import coordinate, cut_result, vote
from headrace.scheduler.batching.order_time import order_at
from headrace.scheduler.batching.planner import Planner
from headrace.scheduler.queues.deadlines import OrderTimer
from headrace.scheduler.state.state import State


class LockstepPlanner:
    """Orders at most one pass of all replicas a call, while the pipelines have a credit left."""

    def __init__(self, state: State, planners: Sequence[Planner]) -> None:
        """planners: of all replicas, in their order; at least two."""
        self._state = state
        self._planners = planners

    def plan(self, now: float) -> None:
        """Order the next pass, if any replica has anything to compute."""
        if not self._due(now):
            return
        state, rules = self._state, self._state.config.rules
        drafts = [planner.draft(now) for planner in self._planners]
        votes = [vote([row.count for row in draft.rows], rules) for draft in drafts]
        agreement = coordinate(votes, rules)
        assert agreement is not None, "there are several replicas"
        if agreement.idle:
            return
        if rules.cut:
            state.metrics.counters.add("overlap_passes_total", labels=(cut_result(votes, agreement),))
        seq = state.out.next_seq()
        pairs = zip(self._planners, drafts, strict=True)
        plans = [planner.order(draft, seq, agreement, now) for planner, draft in pairs]
        for planner, plan in zip(self._planners, plans, strict=True):
            planner.send(plan)

    def _due(self, now: float) -> bool:
        """Whether the next pass is to be ordered now; otherwise when, if there may be anything to compute."""
        state, config = self._state, self._state.config
        in_flight = max(len(replica.plans) for replica in state.replicas)
        credits = config.credits - in_flight
        runnable = any(replica.queues.runnable for replica in state.replicas)
        if not state.engine.ready or credits <= 0 or not runnable:
            return False
        at = self._order_at()
        if at is None or at <= now:
            return True
        if at < inf:
            state.deadlines.set(OrderTimer(0), at)
        return False

    def _order_at(self) -> float | None:
        """Shortly before the replica that takes longest for the passes ahead has computed them; None for at once."""
        busy = [
            replica for replica in self._state.replicas if any(plan.rows for plan in replica.plans.of_first_stage())
        ]
        times = [order_at(replica.plans, replica.costs) for replica in busy]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None
