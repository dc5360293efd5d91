"""The results of plans: computed positions, sampled tokens, and decoding here."""

from headrace.core.messages.replies import HiddenPart, LogprobPart, Tokens
from headrace.core.messages.stage_events import PlanDone, PromptLogprobs, RowHidden, SampledToken
from headrace.core.types import refusals
from headrace.core.types.errors import GRAMMAR_REJECTED, NONFINITE, ErrorInfo
from headrace.core.types.requests.outcomes import DISCARDED
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.lifecycle.preemption import Preemption
from headrace.scheduler.prefill.handoff import KvHandoff
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.plan_table import Plan, PlannedRow
from headrace.scheduler.state.state import State


class TokenGeneration:
    """Applies the results of plans to requests."""

    def __init__(self, state: State, completion: Completion, handoff: KvHandoff, preemption: Preemption) -> None:
        self._state = state
        self._completion = completion
        self._handoff = handoff
        self._preemption = preemption

    def plan_done(self, plan: Plan, event: PlanDone, now: float) -> None:
        """The last stage has computed the plan. Rows of requests that have ended meanwhile only free their pages; those
        that came out NaN or infinite keep them out of the prefix cache, as pages of earlier chunks may be in it."""
        for logprobs in event.prompt_logprobs:
            self._logprobs(logprobs)
        for reported in event.hidden:
            self._hidden(reported)
        samples = {sampled.request: sampled for sampled in event.samples}
        rejected = {rejection.request: rejection.message for rejection in event.rejected}
        for row in plan.rows:
            self._state.of(row.request).plans.leave(row)
            if row.serial in event.nonfinite and row.request.lease is not None:
                row.request.lease.nonfinite = True
            if row.request.ended:
                self._completion.release_if_safe(row.request)
            elif row.serial in event.nonfinite:
                self._fail_nonfinite(row, now)
            elif row.serial in rejected:
                self._end_rejected(row.request, rejected[row.serial], now)
            else:
                self._row_done(plan, row, samples.get(row.serial), now)
        for request, chunk in plan.sends:
            self._handoff.reached(request, chunk, now)

    def plan_cancelled(self, plan: Plan, now: float) -> None:
        """The stages are through with a plan of pieces that was cancelled: those begin again where they were, or end
        where no more of them is wanted."""
        for row in plan.rows:
            request = row.request
            self._state.of(request).plans.leave(row)
            if request.ended:
                self._completion.release_if_safe(request)
            elif request.target <= request.computed:
                self._completion.complete(request, DISCARDED, now)
            else:
                self._preemption.requeue_if_due(request, now)

    def accept_token(self, request: Request, sampled: SampledToken, now: float, given_reason: str = "") -> None:
        """Take in the next token of a request that is decoded here. given_reason: why the prefill server says that the
        request ends with it, "" if it does not."""
        reason = self._append(request, sampled) or given_reason
        if reason:
            self._completion.complete(request, reason, now)
        elif request.phase is not Phase.GENERATING:
            self._state.enter(request, Phase.GENERATING, now)
            queues = self._state.of(request).queues
            if request.arrival not in queues.preempting and request.planned + 1 < request.token_limit:
                queues.start_decoding(request)

    def resume(self, request: Request, now: float) -> None:
        """The KV of a preempted request was fetched again: it goes on with its last token."""
        self._state.enter(request, Phase.GENERATING, now)
        self._state.of(request).queues.start_decoding(request)

    def make_room(self, request: Request, now: float) -> bool:
        """Lease pages for the request's next position, preempting the latest arrivals as needed. False when it has to
        wait, is preempted itself, or ends because it fills the pool alone."""
        replica, queues = self._state.of(request), self._state.of(request).queues
        assert request.lease is not None, "a request that decodes has pages"
        while not replica.cache.grow(request.lease, request.planned + 1):
            if self._completion.end_moves(replica, refusals.PAGES_NEEDED.error(), now):
                continue
            if queues.preempting or replica.moves or replica.loads_for_none:
                return False  # those free pages soon
            victim = queues.decoding[max(queues.decoding)]
            if victim is request and len(queues.decoding) == 1:
                self._make_room_alone(request, now)
                return False
            self._preemption.preempt(victim, now)
            if victim is request:
                return False
        return True

    def _make_room_alone(self, request: Request, now: float) -> None:
        """No other request decodes. Wait for requests that still hold pages; without any, end the request.

        Unless the pool is large enough: the lease may hold a private copy of a page that the prefix tree has too, since
        an equal prompt was computed first. A request that starts again uses the tree's page.
        """
        replica = self._state.of(request)
        if replica.cache.leases > 1 or request.in_flight:
            return
        if replica.cache.pages_for(request.planned + 1) > replica.cache.total:
            self._completion.complete(request, "length", now)
        else:
            self._preemption.preempt(request, now)

    def _fail_nonfinite(self, row: PlannedRow, now: float) -> None:
        """A row came out NaN or infinite: fail its request."""
        request = row.request
        text = f"the model's results for the first {row.end} tokens of this request are NaN or infinite"
        self._completion.fail(request, ErrorInfo(code=NONFINITE, message=text, status=500, field="prompt"), now)

    def _end_rejected(self, request: Request, message: str, now: float) -> None:
        """The grammar of a request does not allow its first token, of a prefill server that has not masked it; or it
        cannot go on, since one of its steps takes more than it may, say. What there is of the text is cut short then,
        as by max_tokens."""
        foreign = isinstance(request.route, FetchFrom) and request.generated <= 1
        if request.generated and not foreign:
            self._completion.complete(request, "length", now)
            return
        if foreign:
            error = ErrorInfo(code=GRAMMAR_REJECTED, message=message, status=502, at_prefill=True)
        else:
            error = refusals.STEP_TOO_COSTLY.error(problem=message)
        self._completion.fail(request, error, now)

    def _row_done(self, plan: Plan, row: PlannedRow, sampled: SampledToken | None, now: float) -> None:
        state, request = self._state, row.request
        if request.span_log is not None and request.phase is Phase.RUNNING:
            started = max(request.since, plan.started or 0.0)
            request.span_log.chunk(request.computed, row.end - request.computed, started, now)
        request.computed = row.end
        assert request.lease is not None, "a request in a plan has pages"
        if row.sampled and sampled is None:
            self._completion.fail(request, refusals.NO_TOKEN.error(), now)
            return
        if sampled is not None:
            state.of(request).cache.prove(request.lease)
        state.of(request).cache.publish(request.lease, request.tokens, row.end)
        if request.phase is Phase.RUNNING:
            self._progress(request)
        if sampled is not None and row.sampled:
            self._token_computed(plan, request, sampled, now)
        elif request.open and row.end >= request.target:
            self._completion.complete(request, DISCARDED, now)
        self._preemption.requeue_if_due(request, now)

    def _token_computed(self, plan: Plan, request: Request, sampled: SampledToken, now: float) -> None:
        if not request.generated and request.result.first is None:
            self._state.metrics.first_token(request, now)
            self._state.promises.first_token(request, now)
        if request.decodes_here:
            self.accept_token(request, sampled, now)
        else:
            self._last_token_here(plan, request, sampled, now)

    def _last_token_here(self, plan: Plan, request: Request, sampled: SampledToken, now: float) -> None:
        """The first token of a request that is not decoded here is the last one that this server generates."""
        first = request.result.first
        if first is not None:  # its prompt was computed once before, and the client has that token
            request.append(first.token)
            self._handoff.prompt_computed(plan, request, sampled, now)
            return
        reason = self._append(request, sampled)
        if isinstance(request.route, SendTo):
            self._handoff.first_token(plan, request, sampled, reason, now)
        else:
            self._completion.complete(request, reason or DISCARDED, now)

    def _append(self, request: Request, sampled: SampledToken) -> str:
        """Report a token; returns why the request ends with it, "" if it does not."""
        reason = request.append(sampled.token)
        self._state.metrics.counters.add("generated_tokens_total")
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        draft = None if sampled.draft is None else sampled.draft.best(request.submit.sampling.draft_top_k)
        self._state.out.add(Tokens(rid=request.rid, tokens=(sampled.token,), logprobs=logprobs, draft=draft))
        return reason or ""

    def _logprobs(self, row: PromptLogprobs) -> None:
        """Report logprobs of prompt tokens to the client."""
        request = self._state.requests.by_serial(row.request)
        if request is not None and not request.ended:
            for run in row.runs:
                self._state.out.add(LogprobPart(rid=request.rid, run=run))

    def _hidden(self, row: RowHidden) -> None:
        """Report hidden states to a client that asks for them, and keep that of the last prompt token for a peer."""
        request = self._state.requests.by_serial(row.request)
        if request is None or request.ended:
            return
        if request.submit.sampling.hidden_states is not None:
            self._state.out.add(HiddenPart(rid=request.rid, states=row.states))
        if isinstance(request.route, SendTo):
            request.result.last_hidden = row.states.at(request.prompt_tokens - 1)

    def _progress(self, request: Request) -> None:
        if request.submit.progress and request.generated == 0:
            self._state.out.add(request.progress("computing", request.computed))
