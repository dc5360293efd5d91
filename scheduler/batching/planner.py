"""Makes plans: which rows go into the next forward pass.

budget (chunk_tokens)  ├ decode rows, 1 each ┤ running prefills, in order ┤ new ones, as the policy says ┤
"""

from headrace.core.messages.orders import Forward, PlanRow
from headrace.core.stats import TOKENS
from headrace.core.types.geometry import ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.request import FetchFrom
from headrace.scheduler.decode.fetch import RemoteFetch
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.state.chunking import chunk_length
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.metrics import ROWS
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import Plan, PlannedRow, State


class BatchBuilder:
    """A plan in the making. budget: tokens left; slots: rows left."""

    def __init__(self, budget: int, slots: int) -> None:
        self.budget = budget
        self.slots = slots
        self.rows: list[PlanRow] = []
        self.planned: list[PlannedRow] = []

    @property
    def full(self) -> bool:
        return self.budget <= 0 or self.slots <= 0

    def add(self, row: PlanRow, planned: PlannedRow) -> None:
        self.rows.append(row)
        self.planned.append(planned)
        self.budget -= row.count
        self.slots -= 1


class Planner:
    """Emits at most one Forward a call, with the Sends that follow it, while the pipeline has a credit left."""

    def __init__(self, state: State, generate: TokenGeneration, handoff: KvHandoff, fetch: RemoteFetch) -> None:
        self._state = state
        self._generate = generate
        self._handoff = handoff
        self._fetch = fetch
        self._refused: tuple[int, int, int] | None = None

    def plan(self, now: float) -> None:
        state, config = self._state, self._state.config
        if not state.ready:
            return
        if len(state.plans) >= config.stages + config.pipeline_depth:
            return
        draft = BatchBuilder(config.chunk_tokens, config.max_running)
        self._decode(draft, now)
        for request in list(state.prefilling.values()):
            if draft.full:
                break
            self._chunk(draft, request)
        self.start(draft, now)
        if draft.rows:
            self._order(draft, now)

    def start(self, draft: BatchBuilder | None, now: float) -> None:
        """Start those who wait, in the policy's order: fetches at any time, prefills only into a draft with room."""
        state = self._state
        while state.ready and (head := state.waiting.head(now)) is not None:
            fetching = isinstance(head.route, FetchFrom) and head.incoming is None
            if not fetching and (draft is None or draft.full or self._crowded()):
                return
            attempt = (head.serial, state.cache.version, state.metadata_rows.free)
            if attempt == self._refused:
                return  # nothing has changed since it did not fit
            started = self._fetch.start(head, now) if fetching else self._lease(head, now)
            if not started:
                self._refused = attempt
                return
            if not fetching and draft is not None:
                self._chunk(draft, head)

    def _crowded(self) -> bool:
        """Decoding here already takes all the rows that a plan can have."""
        return len(self._state.prefilling) + len(self._state.decoding) >= self._state.config.max_running

    def _decode(self, draft: BatchBuilder, now: float) -> None:
        """One row for each request that decodes here, least recently planned first.

        With several stages each plan takes its share of them, so that a request's next token is planned about when
        the one before it leaves the last stage.
        """
        decoding = self._state.decoding
        share = ceil_div(len(decoding), self._state.config.stages)
        for request in list(decoding.values()):
            if draft.full or len(draft.rows) >= share:
                return
            if request.arrival not in decoding or not self._generate.make_room(request, now):
                continue
            # A token that came by wire is given; one that this pipeline samples it has, reported or not.
            token = b"" if request.next_token_on_stages else request.packed(request.planned, request.planned + 1)
            self._add(draft, request, 1, token)
            if request.planned + 1 < request.token_limit:
                decoding.move_to_end(request.arrival)
            else:
                del decoding[request.arrival]

    def _lease(self, request: Request, now: float) -> bool:
        """Lease pages for all that is to be computed, with the metadata row of one whose peer has come; False when they
        are not to be had now. Both or none: a request that held the one and waited for the other could wait for ever.
        """
        state = self._state
        needs_row = request.outgoing is not None
        if needs_row and not state.metadata_rows.free:
            return False
        again = request.generated > 0
        match = again or request.submit.sampling.prompt_logprobs is None
        lease = state.cache.acquire(request.tokens, request.salt, match=match)
        if lease is None:
            return False
        state.waiting.remove(request)
        request.lease = lease
        if needs_row:
            request.row = state.metadata_rows.allocate(1, request.arrival)[0]
        cached = lease.matched * state.config.page_size
        state.unplanned -= cached
        request.planned = request.computed = cached
        if not again:
            request.cached_tokens = cached
            state.counters.add("prompt_tokens_total", request.prompt_tokens)
            state.counters.add("cached_tokens_total", cached)
        state.enter(request, Phase.RUNNING, now)
        state.prefilling[request.arrival] = request
        return True

    def _chunk(self, draft: BatchBuilder, request: Request) -> None:
        """The next chunk of a prefill, as large as the budget allows. One that is short because it takes long, after a
        long prefix, uses the budget up like a full one."""
        state, config = self._state, self._state.config
        start = request.planned
        length = chunk_length(state.costs, start, config.chunk_tokens, config.page_size)
        full = max(1, draft.budget * length // config.chunk_tokens)
        count = min(full, request.target - start)
        draft.budget -= draft.budget * count // full - count
        state.unplanned -= count
        self._add(draft, request, count, request.packed(start, start + count))
        if request.planned < request.target:
            return
        del state.prefilling[request.arrival]
        if request.decodes_here and request.planned + 1 < request.token_limit:
            state.decoding[request.arrival] = request

    def _add(self, draft: BatchBuilder, request: Request, count: int, tokens: bytes) -> None:
        lease = request.lease
        assert lease is not None, "a request is planned with its pages"
        sampling = request.submit.sampling
        end = request.planned + count
        sampled = end >= request.target
        logprobs = sampling.prompt_logprobs if request.generated == 0 and end <= request.target else None
        row = PlanRow(
            request=request.serial,
            start=request.planned,
            count=count,
            pages=pack(lease.pages[: self._state.cache.pages_for(end)]),
            tokens=tokens,
            sample=sampling if sampled else None,
            feeds=sampled and request.decodes_here and end + 1 < request.token_limit,
            prompt_logprobs=logprobs,
            generated=max(0, end - request.prompt_tokens),
            next_token=request.token_at(end) if logprobs is not None and end < request.prompt_tokens else None,
        )
        draft.add(row, PlannedRow(request, request.serial, end, sampled))
        request.planned = end
        request.next_token_on_stages = sampled
        request.in_flight += 1
        request.known_to_stages = True

    def _order(self, draft: BatchBuilder, now: float) -> None:
        state = self._state
        tokens = sum(row.count for row in draft.rows)
        plan = Plan(seq=state.out.next_seq(), tokens=tokens, rows=tuple(draft.planned))
        state.out.add(Forward(seq=plan.seq, rows=tuple(draft.rows)))
        if not state.plans:
            state.deadlines.set(Timer.PLAN, 0, now + state.config.stage_timeout_s)
            state.bubbles.begin(now)
        state.plans[plan.seq] = plan
        if state.trace_log is not None:
            state.trace_log.issued()
        state.counters.add("plans_total")
        state.histograms.observe("plan_tokens", tokens, bounds=TOKENS)
        state.histograms.observe("plan_rows", len(draft.rows), bounds=ROWS)
        for row in plan.rows:
            self._handoff.follow(plan, row.request, row.end)
