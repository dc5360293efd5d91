"""The planner of one replica: which rows go into its next forward pass, and when that is ordered.

budget (chunk_tokens)   fcfs   ├ decode rows, 1 each ┤ running prefills, in order ┤ new ones, by arrival ┤
                   the others  ├ decode rows, 1 each ┤ reserve: the oldest ┤ running and new ones, best first ┤

A pass is ordered shortly before the first stage has computed those that it was given:

    first stage    ├──── pass 1 ────┤├──── pass 2 ────┤
    ordered        1              2 ▲               3 ▲      the stage finds its next pass when it asks for it
    arrivals         ├── in pass 2 ─┤├── in pass 3 ──┤

A pass that is ordered as soon as there is a credit keeps out what arrives while the one before it is computed.

Lockstep replicas: one draft for each replica, one agreement, one Forward with one number to each of them.

    draft 0 ─► vote ─┐                    ┌─► Forward 7  rows of replica 0, agreement
    draft 1 ─► vote ─┼─► coordinate() ────┼─► Forward 7  rows of replica 1, agreement
    draft 2 ─► vote ─┘                    └─► Forward 7  (),                agreement      replica 2 is idle
"""

from collections.abc import Sequence
from math import inf

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.stats import TOKENS
from headrace.core.types.kv.geometry import ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.ranks.coordinate import Agreement, coordinate, cut_result, vote
from headrace.core.types.requests.images import rotary_positions
from headrace.scheduler.batching.open_prompts import OpenPieces
from headrace.scheduler.batching.prefill_shares import PrefillShares, next_chunk
from headrace.scheduler.batching.starting import Starter
from headrace.scheduler.costs.cost_model import CostModel
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.lifecycle.preemption import Preemption
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.queues.deadlines import OrderTimer, PlanTimer
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.plan_table import BatchBuilder, Plan, PlanTable
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State
from headrace.scheduler.telemetry.metrics import ROWS

LEAD_S = 0.003
"""For planning, and for the order to reach the stages."""

MARGIN = 0.05
"""Share by which passes may be shorter than predicted. One that is still shorter leaves the stage idle while its report
and the next order are on their way."""

LONG_S = 0.2
"""Passes that are longer are not ordered ahead: the stage is idle for about a hundredth of their time, and they vary by
more."""


def order_at(plans: PlanTable, costs: CostModel) -> float | None:
    """Time at which the next pass is to be ordered, unless those before it are done sooner; None for at once.

    Passes with decode rows are not waited for: the cost model does not predict them, and they are short.
    """
    ahead = list(plans.of_first_stage())
    if not ahead or not costs.trusted or any(plan.decode_rows for plan in ahead):
        return None
    seconds = sum(costs.first_stage_s(plan.load) for plan in ahead)
    return inf if seconds > LONG_S * len(ahead) else plans.first_begun + (1 - MARGIN) * seconds - LEAD_S


def _reached(state: State, timer: OrderTimer, at: float | None, now: float) -> bool:
    """Whether it is time for the next pass; if not, the timer is set. at: see order_at()."""
    if at is None or at <= now:
        return True
    if at < inf:
        state.deadlines.set(timer, at)
    return False


class Planner:
    """Emits at most one Forward of a replica a call, with the SendChunks that follow it, while its pipeline has a
    credit left. Lockstep replicas have their passes ordered by LockstepPlanner."""

    def __init__(
        self,
        state: State,
        replica: Replica,
        generation: TokenGeneration,
        handoff: KvHandoff,
        fetch: RemoteFetch,
        preemption: Preemption,
        open_prompts: OpenPieces,
    ) -> None:
        self._state = state
        self._replica = replica
        self._generation = generation
        self._handoff = handoff
        self._starter = Starter(state, replica, fetch)
        self._preemption = preemption
        self._shares = PrefillShares(state, replica, self._starter)
        self._open = open_prompts

    def plan(self, now: float) -> None:
        """Order the next forward pass, if there is anything to compute and a credit left."""
        if self._replica.queues.runnable:
            self._open.give_way()
        if self._due(now):
            batch = self.draft(now)
        elif self.may_open:
            batch = self.draft_open(now)
        else:
            return
        if batch.rows:
            self.send(self.order(batch, self._state.out.next_seq(), None, now))

    def draft(self, now: float) -> BatchBuilder:
        """The rows of the next forward pass, which has to be ordered if there are any."""
        config, queues = self._state.config, self._replica.queues
        self._preemption.make_way(self._replica, now)
        batch = BatchBuilder(config.chunk_tokens, config.max_running)
        self._decode(batch, now)
        if queues.policy.strict:
            self._in_order(batch, now)
        else:
            for request, count in self._shares.divide(batch.budget, batch.slots, now):
                self._prefill(batch, request, count)
            for request in self._shares.divided:
                if request in queues.policy:
                    queues.revise(request, now)
        return batch

    @property
    def may_open(self) -> bool:
        """Whether a pass of open prompts may be ordered now."""
        return self._state.may_plan(len(self._replica.plans)) and self._open.may_run

    def draft_open(self, now: float) -> BatchBuilder:
        """The rows of a pass of open prompts. They give their pages up when it is done."""
        batch = BatchBuilder(self._open.pass_tokens, self._state.config.max_running, pieces=True)
        for request, count in self._open.divide(batch.budget, batch.slots, now):
            self._prefill(batch, request, count)
            self._replica.queues.preempt(request)
        return batch

    def order(self, batch: BatchBuilder, seq: int, agreement: Agreement | None, now: float) -> Plan:
        """Order the forward pass with these rows, under the number seq."""
        state, replica, metrics = self._state, self._replica, self._state.metrics
        plan = batch.build(seq)
        plan.gives_way = plan.pieces and state.engine.cancels
        digest = state.digests.due(seq, replica.ranks, ((row.request, row.end) for row in plan.rows))
        replica.order(Forward(seq=seq, rows=tuple(batch.rows), agreement=agreement, digest=digest))
        if not replica.plans:
            state.deadlines.set(PlanTimer(replica.index), now + state.config.stage_timeout_s)
            replica.bubbles.begin(now)
        replica.plans.add(plan, now)
        if not plan.rows:
            return plan
        if metrics.trace is not None:
            metrics.trace.issued()
        metrics.counters.add("plans_total")
        metrics.histograms.observe("plan_tokens", plan.tokens, bounds=TOKENS)
        metrics.histograms.observe("plan_rows", len(batch.rows), bounds=ROWS)
        return plan

    def send(self, plan: Plan) -> None:
        """Order out the chunks that a plan completes."""
        for row in plan.rows:
            self._handoff.planned(plan, row.request, row.end)

    def _due(self, now: float) -> bool:
        """Whether the next pass is to be ordered now; otherwise when, if there may be anything to compute."""
        replica = self._replica
        if not self._state.may_plan(len(replica.plans)) or not replica.queues.runnable:
            return False
        return _reached(self._state, OrderTimer(replica.index), order_at(replica.plans, replica.costs), now)

    def start(self, now: float) -> None:
        """Start to fetch what can be fetched."""
        self._starter.start_fetches(now)

    def _in_order(self, batch: BatchBuilder, now: float) -> None:
        """Add running prefills, then waiting ones, each to its end before the next."""
        running = self._replica.queues.prefilling.values()
        for request in sorted(running, key=lambda request: request.gives_way):
            if batch.full:
                break
            if request.has_kv:
                self._chunk(batch, request)
        while (started := self._starter.start_next(now, fetches_only=batch.full)) is not None:
            if started.has_kv:
                self._chunk(batch, started)

    def _decode(self, batch: BatchBuilder, now: float) -> None:
        """Add one row for each request that decodes here, least recently planned first.

        With several stages each plan takes its share of them, so that a request's next token is planned about when
        the one before it leaves the last stage.
        """
        queues = self._replica.queues
        share = ceil_div(len(queues.decoding), self._state.config.stages)
        for request in list(queues.decoding.values()):
            if batch.full or len(batch.rows) >= share:
                return
            if request.arrival not in queues.decoding or not self._generation.make_room(request, now):
                continue
            position = request.planned
            token = b"" if request.on_stages.next_token else request.packed(position, position + 1)
            self._add(batch, request, 1, token)
            if request.planned + 1 < request.token_limit:
                queues.decoded(request)
            else:
                queues.stop_decoding(request)

    def _chunk(self, batch: BatchBuilder, request: Request) -> None:
        """Add the next chunk of a prefill, as large as the budget allows."""
        count, used = next_chunk(self._state, request, batch.budget)
        batch.budget -= used - count
        self._prefill(batch, request, count)

    def _prefill(self, batch: BatchBuilder, request: Request, count: int) -> None:
        """Add the next count tokens of a prefill; with its last ones it may begin to decode."""
        queues, cache, start = self._replica.queues, self._replica.cache, request.planned
        behind = request.target + request.open  # the prompt goes on behind a piece
        count = cache.cut(start, count, behind, request.terms.keep_tokens)
        self._state.metrics.served(request, queues.charge(request, count))
        assert request.lease is not None, "a request is planned with its pages"
        checkpoint = cache.checkpoint(request.lease, start + count)
        self._add(batch, request, count, request.packed(start, start + count), checkpoint)
        if request.planned < request.target or request.open:
            return
        queues.end_prefill(request)
        if request.decodes_here and request.planned + 1 < request.token_limit:
            queues.start_decoding(request)

    def _add(self, batch: BatchBuilder, request: Request, count: int, tokens: bytes, checkpoint: int = -1) -> None:
        lease = request.lease
        assert lease is not None, "a request is planned with its pages"
        sampling = request.submit.sampling
        end = request.planned + count
        sampled = end >= request.target and not request.open
        logprobs = sampling.prompt_logprobs if request.generated == 0 and end <= request.target else None
        if end < sampling.prompt_logprobs_start:
            logprobs = None
        row = PlanRow(
            request=request.serial,
            start=request.planned,
            count=count,
            pages=pack(lease.pages[: self._replica.cache.pages_for(end)]),
            tokens=tokens,
            sample=sampling if sampled else None,
            feeds=sampled and request.decodes_here and end + 1 < request.token_limit,
            prompt_logprobs=logprobs,
            generated=max(0, end - request.prompt_tokens),
            grammar=request.grammar_start(),
            history=request.token_history() if sampled else None,
            next_token=request.token_at(end) if logprobs is not None and end < request.prompt_tokens else None,
            prompt_logprobs_start=0 if logprobs is None else sampling.prompt_logprobs_start,
            hidden=request.hidden_wanted(end, count),
            draft_top_k=request.draft_wanted(end).top_k,
            slot=lease.slot,
            resume=lease.resume if request.planned == lease.matched * self._replica.cache.page_size else -1,
            checkpoint=checkpoint,
            adapter=request.terms.adapter,
            images=request.image_inputs(end),
            rotary=rotary_positions(request.images, request.planned, count),
        )
        batch.add(row, request, end)
        self._replica.queues.plan(request, count)
        request.on_stages.next_token = sampled
        request.on_stages.known = True


class LockstepPlanner:
    """Orders at most one pass of all lockstep replicas a call, while the pipelines have a credit left.

    Replicas that share collectives (expert parallelism) have to take part in each pass, or the others wait for ever.
    """

    def __init__(self, state: State, planners: Sequence[Planner]) -> None:
        """planners: of all replicas, in their order; at least two."""
        self._state = state
        self._planners = planners

    def plan(self, now: float) -> None:
        """Order the next pass, if any replica has anything to compute. Pieces of open prompts have passes of their own,
        as the longest part of a pass is what all replicas wait for."""
        state, rules = self._state, self._state.config.rules
        if self._due(now):
            drafts = [planner.draft(now) for planner in self._planners]
        elif self._may_open():
            drafts = [planner.draft_open(now) for planner in self._planners]
        else:
            return
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
        replicas = self._state.replicas
        in_flight = max(len(replica.plans) for replica in replicas)
        if not self._state.may_plan(in_flight) or not any(replica.queues.runnable for replica in replicas):
            return False
        return _reached(self._state, OrderTimer(0), self._order_at(), now)

    def _may_open(self) -> bool:
        """Whether no replica has anything else to compute."""
        if any(replica.queues.runnable for replica in self._state.replicas):
            return False
        return any(planner.may_open for planner in self._planners)

    def _order_at(self) -> float | None:
        """Shortly before the replica that takes longest for the passes ahead has computed them; None for at once."""
        busy = [
            replica for replica in self._state.replicas if any(plan.rows for plan in replica.plans.of_first_stage())
        ]
        times = [order_at(replica.plans, replica.costs) for replica in busy]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None
