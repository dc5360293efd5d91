"""The engine as the scheduler sees it: stages that come up, plans that come back, a watchdog for those that do not."""

from headrace.core.messages.frontend import EngineState, StageDown
from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import BeginEpoch
from headrace.core.messages.peers import EndPeer
from headrace.core.messages.stage_events import PlanDone, StageReady
from headrace.core.types.backends import writes_directly
from headrace.core.types.errors import STAGE_FAILED, ErrorInfo
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.state.deadlines import Timer
from headrace.scheduler.state.record import Request
from headrace.scheduler.state.state import State


class StageGroup:
    """Ready when every stage is. A stage that fails takes the whole engine with it: all stages have to come up anew.

    Every start of the group has its epoch, so that stages of different starts are never taken for one engine.
    """

    def __init__(self, state: State, completion: Completion, generate: TokenGeneration) -> None:
        self._state = state
        self._completion = completion
        self._generate = generate
        self._up: dict[int, StageReady] = {}
        self._epoch = 0
        self._served = False  # the group has computed a plan
        self._told = EngineState(ready=False)

    def ready(self, event: StageReady, now: float) -> bool:
        """A stage is up; True when it was the last one."""
        state = self._state
        if event.epoch < self._epoch:
            state.drop("old_stage")
            return False
        if state.ready:  # it has restarted on its own, and its pool is empty
            self.failed(event.stage, f"stage {event.stage} has restarted", now)
        if event.epoch > self._epoch:
            self._epoch = event.epoch
            self._up.clear()
        page_size = event.geometry.page_size
        if event.stage not in state.stages or page_size != state.config.page_size:
            expected = f"{state.config.stages} stages with pages of {state.config.page_size} tokens"
            self.announce(f"stage {event.stage} has pages of {page_size} tokens; expected are {expected}")
            return False
        self._up[event.stage] = event
        if other := next((stage for stage in self._up.values() if stage.fingerprint != event.fingerprint), None):
            text = (
                f"its model is another one than that of stage {other.stage}: {event.fingerprint}, {other.fingerprint}"
            )
            self.failed(event.stage, text, now)
            return False
        if len(self._up) < state.config.stages:
            return False
        sizes = [stage.kv_pages for stage in self._up.values()]
        state.new_cache(min([*sizes, state.config.kv_pages] if state.config.kv_pages else sizes))
        state.vocab_size = state.config.vocab_size or min(stage.vocab_size for stage in self._up.values())
        costs = [stage.cost for stage in self._up.values() if stage.cost is not None]
        state.costs = tuple(costs) if state.config.chunking == "dynamic" else ()
        state.ready = True
        state.out.add(BeginEpoch(seq=state.out.next_seq(), epoch=self._epoch))
        self.announce("draining" if state.draining else "")
        return True

    def gathering(self, event: JoinProgress) -> None:
        """StageGroup that others start are on their way; while they are not up, that is why we do not serve."""
        if not self._state.ready:
            self.announce(event.message)

    def done(self, event: PlanDone, now: float) -> None:
        """A stage has computed a plan; with the last stage, it is done."""
        state = self._state
        plan = state.plans.get(event.seq)
        if event.stage != state.config.stages - 1:
            state.bubbles.computed(event.stage, event.duration_s, now)
            if plan is not None:  # else the last stage's word has overtaken it
                plan.reported.add(event.stage)
            return
        if plan is None:
            state.drop("unknown_plan")
            return
        del state.plans[event.seq]
        state.bubbles.computed(event.stage, event.duration_s, now)
        self._served = True
        if state.plans:
            state.deadlines.set(Timer.PLAN, 0, now + state.config.stage_timeout_s)
        else:
            state.deadlines.clear(Timer.PLAN, 0)
            state.bubbles.end(now)
        state.rate.observe(plan.tokens, event.duration_s)
        state.histograms.observe("plan_duration_seconds", event.duration_s)
        self._generate.done(plan, event, now)

    def plan_timed_out(self, now: float) -> None:
        plan = next(iter(self._state.plans.values()), None)
        if plan is not None:
            silent = next((stage for stage in self._state.stages if stage not in plan.reported), 0)
            text = f"stage {silent} has not finished a plan in {self._state.config.stage_timeout_s:g} s"
            self.failed(silent, text, now)

    def answer_timed_out(self, request: Request, now: float) -> None:
        silent = request.awaiting_stages or (request.incoming.unready if request.incoming is not None else set())
        if silent:
            stage = min(silent)
            text = f"stage {stage} has not answered in {self._state.config.stage_timeout_s:g} s"
            self.failed(stage, text, now)

    def failed(self, stage: int, message: str, now: float) -> None:
        """Nothing that the engine holds is of use any more: every request fails, and the pool starts over."""
        error = ErrorInfo(code=STAGE_FAILED, message=f"stage {stage} failed: {message}", status=503, stage=stage)
        self.stop(error, now)
        self.announce(error.message)
        self._state.out.add(StageDown(stage=stage, message=message, epoch=self._epoch, served=self._served))
        self._served = False

    def stop(self, error: ErrorInfo, now: float) -> None:
        """End every request with this error, without waiting for the stages. Peers whose pages they write must not take
        that for a promise that they have ceased: their sessions end, and they see for themselves."""
        state = self._state
        for session, peer in state.peers.items():
            if writes_directly(peer.backend):
                state.out.add(EndPeer(session=session, reason=error.message))
        state.ready = False
        self._up.clear()
        state.plans.clear()
        state.bubbles.reset()
        state.deadlines.clear(Timer.PLAN, 0)
        self._completion.void(error, now)
        state.new_cache(state.cache.total)

    def announce(self, reason: str) -> None:
        """Tell the front end whether we would serve, when that has changed."""
        told = EngineState(ready=self._state.ready and not self._state.draining, reason=reason)
        if told != self._told:
            self._told = told
            self._state.out.add(told)
