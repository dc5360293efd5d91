"""What comes of plans: computed positions, sampled tokens; decoding here, and giving way when pages run out."""

from headrace.core.messages.frontend import Progress, Tokens
from headrace.core.messages.stage_events import PlanDone, SampledToken
from headrace.core.types.errors import STAGE_FAILED, ErrorInfo
from headrace.core.types.request import SendTo
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.prefill.handoff import COMPLETE, KvHandoff
from headrace.scheduler.state.record import Phase, Request
from headrace.scheduler.state.state import Plan, PlannedRow, State


class TokenGeneration:
    """Applies the results of plans to requests."""

    def __init__(self, state: State, completion: Completion, handoff: KvHandoff) -> None:
        self._state = state
        self._completion = completion
        self._handoff = handoff

    def done(self, plan: Plan, event: PlanDone, now: float) -> None:
        """The last stage has computed the plan. Rows of requests that have ended meanwhile are only counted off."""
        for logprobs in event.prompt_logprobs:
            request = self._state.records.get(logprobs.request)
            if request is not None:
                request.prompt_logprobs.update(enumerate(logprobs.entries, logprobs.start))
        samples = {sampled.request: sampled for sampled in event.samples}
        for row in plan.rows:
            row.request.in_flight -= 1
            if row.request.ended:
                self._completion.release_if_safe(row.request)
            else:
                self._computed(plan, row, samples.get(row.serial), now)
        for request, chunk in plan.sends:
            self._handoff.reached(request, chunk, now)

    def accept(self, request: Request, sampled: SampledToken, now: float, given_reason: str = "") -> None:
        """A token of a request that is decoded here. given_reason: why the prefill server says it ends with it."""
        reason = self._append(request, sampled) or given_reason
        if reason:
            self._completion.complete(request, reason, now)
        elif request.phase is not Phase.GENERATING:
            self._state.enter(request, Phase.GENERATING, now)
            if not request.preempting and request.planned + 1 < request.token_limit:
                self._state.decoding[request.arrival] = request

    def make_room(self, request: Request, now: float) -> bool:
        """Pages for the request's next position; False when it has to wait, gives way itself, or ends here."""
        state = self._state
        assert request.lease is not None, "a request that decodes has pages"
        while not state.cache.grow(request.lease, request.planned + 1):
            if state.preempting:
                return False  # pages will come of it
            victim = state.decoding[max(state.decoding)]
            if victim is request and len(state.decoding) == 1:
                self._alone(request, now)
                return False
            self._preempt(victim, now)
            if victim is request:
                return False
        return True

    def _alone(self, request: Request, now: float) -> None:
        """No other request decodes. Those that still hold pages will make room; without them, this is the end.

        Unless the pool would do: its lease may hold a page twice, once in the tree for an equal page of somebody who
        was first. Starting again it uses the tree's.
        """
        state = self._state
        if state.cache.leases > 1 or request.in_flight:
            return
        if state.cache.pages_for(request.planned + 1) > state.cache.total:
            self._completion.complete(request, "length", now)
        else:
            self._preempt(request, now)

    def _computed(self, plan: Plan, row: PlannedRow, sampled: SampledToken | None, now: float) -> None:
        state, request = self._state, row.request
        request.computed = row.end
        assert request.lease is not None, "a request in a plan has pages"
        if not row.sampled:
            state.cache.publish(request.lease, request.tokens, row.end)
            self._progress(request)
            return
        if sampled is None:
            error = ErrorInfo(code=STAGE_FAILED, message="the last stage reported no token", status=503)
            self._completion.fail(request, error, now)
            return
        state.cache.publish(request.lease, request.tokens, row.end)
        if request.phase is Phase.RUNNING:
            self._progress(request)
        if request.decodes_here:
            self.accept(request, sampled, now)
        else:
            self._first_elsewhere(plan, request, sampled, now)
        if request.preempting and request.in_flight == 0:
            self._requeue(request, now)

    def _first_elsewhere(self, plan: Plan, request: Request, sampled: SampledToken, now: float) -> None:
        reason = self._append(request, sampled)
        if isinstance(request.route, SendTo):
            self._handoff.first(plan, request, sampled, reason, now)
        else:
            self._completion.complete(request, reason or COMPLETE, now)

    def _append(self, request: Request, sampled: SampledToken) -> str:
        reason = request.append(sampled.token)
        self._state.counters.add("generated_tokens_total")
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        self._state.out.add(Tokens(rid=request.rid, tokens=(sampled.token,), logprobs=logprobs))
        return reason or ""

    def _progress(self, request: Request) -> None:
        if request.submit.progress and request.generated == 0:
            done, total = request.computed, request.prompt_tokens
            self._state.out.add(Progress(rid=request.rid, phase="computing", done=done, total=total))

    def _preempt(self, request: Request, now: float) -> None:
        """Send the request back to the queue, once its plans in flight are done."""
        state = self._state
        del state.decoding[request.arrival]
        request.preempting = True
        state.preempting += 1
        state.counters.add("preemptions_total")
        if request.in_flight == 0:
            self._requeue(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        """Start again with all its tokens as the prompt, under a new serial: nothing late can land on it."""
        state = self._state
        request.preempting = False
        state.preempting -= 1
        self._completion.give_up(request)
        request.serial = state.new_serial()
        state.records[request.serial] = request
        request.planned = request.computed = 0
        request.next_token_on_stages = False
        request.target = request.length
        state.unplanned += request.unplanned
        state.enter(request, Phase.WAITING, now)
        state.waiting.push(request)
