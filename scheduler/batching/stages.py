"""The stage group: stages that come up, plans that they have computed, a watchdog for those that they have not."""

from headrace.core.messages.membership import JoinProgress
from headrace.core.messages.orders import BeginEpoch
from headrace.core.messages.peers import EndPeer
from headrace.core.messages.replies import EngineState, StageDown
from headrace.core.messages.stage_events import PeerLost, PlanDone, StageLoading, StageReady, StageSilence
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.backends import writes_directly
from headrace.core.types.kv.kv_tiers import LIBRARY_PAGES
from headrace.scheduler.decode.generation import TokenGeneration
from headrace.scheduler.lifecycle.completion import Completion
from headrace.scheduler.queues.deadlines import CopyTimer, PlanTimer
from headrace.scheduler.requests.record import Request
from headrace.scheduler.state.plan_table import Plan
from headrace.scheduler.state.replica import Replica
from headrace.scheduler.state.state import State

MAX_SHOWN = 4  # stages that load, in the reason why the server is not ready
PREFILL_PER_DECODE_ROW = 8  # tokens of a plan for each of its decode rows, below which it says little of prefill


class StageGroup:
    """Ready when every stage is. A stage that fails ends the whole engine: all stages have to come up again.

    Each start of the group has its own epoch, so that stages of different starts are never taken for one engine.
    """

    def __init__(self, state: State, completion: Completion, generation: TokenGeneration) -> None:
        self._state = state
        self._completion = completion
        self._generation = generation
        self._up: dict[int, StageReady] = {}
        self._loading: dict[int, StageLoading] = {}
        self._failure = ""  # why the group has to be started again, until it is up
        self._epoch = 0
        self._served = False  # the group has computed a plan
        self._announced = EngineState(ready=False)

    def stage_ready(self, event: StageReady, now: float) -> bool:
        """A stage is up; True when it was the last one, and the group is ready."""
        state = self._state
        if event.epoch < self._epoch:
            state.drop("old_stage")
            return False
        if state.engine.ready:  # it has restarted on its own, and its pool is empty
            self.stage_failed(event.stage, f"{state.config.layout.name(event.stage)} has restarted", now)
        if event.epoch > self._epoch:
            self._epoch = event.epoch
            self._up.clear()
        page_size = event.geometry.page_size
        if event.stage not in state.engine.stages or page_size != state.config.page_size:
            expected = f"{len(state.engine.stages)} stages with pages of {state.config.page_size} tokens"
            self.announce(
                f"{state.config.layout.name(event.stage)} has pages of {page_size} tokens; expected are {expected}"
            )
            return False
        self._up[event.stage] = event
        self._loading.pop(event.stage, None)
        if other := next((stage for stage in self._up.values() if stage.fingerprint != event.fingerprint), None):
            fingerprints = f"{event.fingerprint}, {other.fingerprint}"
            text = f"its model is another one than that of {state.config.layout.name(other.stage)}: {fingerprints}"
            self.stage_failed(event.stage, text, now)
            return False
        if other := next((stage for stage in self._up.values() if stage.adapters != event.adapters), None):
            found = ", ".join(sorted(set(event.adapters.items() ^ other.adapters.items()))[0])
            text = f"its adapters are others than those of {state.config.layout.name(other.stage)}: {found}"
            self.stage_failed(event.stage, text, now)
            return False
        if len(self._up) < len(state.engine.stages):
            return False
        self._start()
        return True

    def loading(self, event: StageLoading) -> None:
        """A stage is not up yet: say how far those are that load."""
        if self._state.engine.ready or event.epoch < self._epoch:
            return
        self._loading[event.stage] = event
        names = self._state.config.layout.name
        shown = [f"{names(rank)} {each}" for rank, each in sorted(self._loading.items())][:MAX_SHOWN]
        if (more := len(self._loading) - len(shown)) > 0:
            shown.append(f"and {more} more")
        self.announce("; ".join([*([self._failure] if self._failure else []), *shown]))

    def gathering(self, event: JoinProgress) -> None:
        """The stages are not up yet: say what they wait for."""
        if not self._state.engine.ready:
            self.announce(event.message)

    def plan_done(self, event: PlanDone, now: float) -> None:
        """A rank has computed a plan; with the one that samples, it is done for its replica."""
        state, metrics, replica = self._state, self._state.metrics, self._state.with_rank(event.stage)
        if event.stage != replica.sampler:
            replica.bubbles.computed(event.stage, event.duration_s, now)
            plan = replica.plans.get(event.seq)
            if plan is not None:  # else the last stage's message has overtaken it
                replica.plans.reported(plan, event.stage, event.duration_s, now)
                metrics.computed(event.stage, event.duration_s, now, plan.tokens, plan.decode_rows)
                self._learn(replica, plan, event, now)
            self._digested(replica, event)
            return
        plan = replica.plans.pop(event.seq, event.duration_s, now)
        if plan is None:
            state.drop("unknown_plan")
            return
        replica.bubbles.computed(event.stage, event.duration_s, now)
        self._served = True
        if replica.plans:
            state.deadlines.set(PlanTimer(replica.index), now + state.config.stage_timeout_s)
        else:
            state.deadlines.clear(PlanTimer(replica.index))
            replica.bubbles.end(now)
        metrics.computed(event.stage, event.duration_s, now, plan.tokens, plan.decode_rows)
        if not plan.rows:
            return  # it was idle in this pass
        if plan.pieces:
            replica.piece_passes.ended(cancelled=plan.cancelled)
            metrics.counters.add("open_passes_total", labels=("cancelled" if plan.cancelled else "computed",))
            metrics.counters.add("open_tokens_total", plan.tokens)
        if plan.cancelled:
            state.digests.cancelled(replica.ranks, plan.seq)
            self._generation.plan_cancelled(plan, now)
            return
        self._digested(replica, event)
        metrics.rate.observe(plan.tokens, event.duration_s)
        state.promises.changed()
        self._learn(replica, plan, event, now)
        metrics.histograms.observe("plan_duration_seconds", event.duration_s)
        self._generation.plan_done(plan, event, now)

    def _digested(self, replica: Replica, event: PlanDone) -> None:
        """A rank may have digested KV."""
        if (digest := self._state.digests.reported(replica.ranks, event)) is not None:
            self._state.out.add(digest)

    def _learn(self, replica: Replica, plan: Plan, event: PlanDone, now: float) -> None:
        """Refine the cost model by a plan that mostly prefills: decode rows cost what it says nothing of, and one that
        was cancelled is not computed to its end."""
        if plan.cancelled:
            return
        place = self._state.config.layout.place(event.stage)
        if place.shard == 0 and plan.decode_rows * PREFILL_PER_DECODE_ROW <= plan.tokens:
            replica.costs.observe(place.stage, plan.load, event.duration_s, now)
        elif place.shard == 0:
            replica.costs.observe_decoding(place.stage, plan.load, event.duration_s)

    def progressed(self, stage: int, now: float) -> None:
        """A rank has computed something. If it is the one that its replica's oldest plan waits for, it has the whole
        timeout again: a long pass is no hang."""
        replica = self._state.with_rank(stage)
        plan = replica.plans.oldest
        if plan is not None and stage == self._awaited(replica, plan):
            self._state.deadlines.set(PlanTimer(replica.index), now + self._state.config.stage_timeout_s)

    def silent(self, event: StageSilence, now: float) -> None:
        """A rank does not answer and is not dead, or answers again (reason ""). Requests wait for it; the server is not
        ready meanwhile."""
        engine = self._state.engine
        if not engine.ready:
            return
        engine.silent_until[event.stage] = now
        if event.reason:
            engine.silent[event.stage] = event.reason
        else:
            engine.silent.pop(event.stage, None)
        reasons = [f"{self._state.config.layout.name(rank)} {text}" for rank, text in sorted(engine.silent.items())]
        self.announce("; ".join(reasons) or ("draining" if self._state.draining else ""))

    @staticmethod
    def _awaited(replica: Replica, plan: Plan) -> int:
        """The first rank that has not computed a plan."""
        return next((rank for rank in replica.ranks if rank not in plan.reported), replica.first_stage)

    def plan_timed_out(self, index: int, now: float) -> None:
        """A replica has done no plan in time: its first rank that has not computed the oldest one has failed."""
        replica = self._state.replicas[index]
        plan = replica.plans.oldest
        if plan is not None:
            silent = self._awaited(replica, plan)
            name = self._state.config.layout.name(silent)
            text = self._state.engine.silent.get(silent)
            text = text or f"has not finished a plan in {self._state.config.stage_timeout_s:g} s"
            self.stage_failed(silent, f"{name} {text}", now)

    def answer_timed_out(self, request: Request, now: float) -> None:
        """A stage has not answered PrepareReceive, CancelSend or CancelReceive in time: it has failed."""
        silent = request.on_stages.stopping or (request.incoming.unready if request.incoming is not None else set())
        if silent:
            stage = min(silent)
            name = self._state.config.layout.name(stage)
            text = f"{name} has not answered in {self._state.config.stage_timeout_s:g} s"
            self.stage_failed(stage, text, now)

    def stage_failed(self, stage: int, message: str, now: float, *, elsewhere: bool = False) -> None:
        """Fail every request and start over with an empty pool. The front end is told first, so that it does not answer
        a request with this error while it still says that it would serve. elsewhere: see StageFailed."""
        name = self._state.config.layout.name(stage)
        error = refusals.STAGE_FAILED.error(stage=stage, name=name, message=message)
        self._state.engine.ready = False
        self._failure = error.message
        self.announce(error.message)
        self.stop(error, now)
        served = self._served or elsewhere
        self._state.out.add(StageDown(stage=stage, message=message, epoch=self._epoch, served=served))
        self._served = False

    def peer_lost(self, event: PeerLost) -> None:
        """A write into a peer's pages was lost on its way: its session has to end."""
        reason = f"{self._state.config.layout.name(event.stage)}: {event.reason}"
        self._state.out.add(EndPeer(session=event.session, reason=reason, backend_failed=True))

    def stop(self, error: ErrorInfo, now: float) -> None:
        """Fail every request with this error, without waiting for the stages. This does not confirm to peers that
        writes into their pages have stopped, so the sessions of peers that we write to directly are ended first."""
        state = self._state
        for peer in state.peers:
            if writes_directly(peer.hello.terms.backend):
                state.out.add(EndPeer(session=peer.hello.session, reason=error.message))
        state.engine.stop()
        self._up.clear()
        self._loading.clear()
        for replica in state.replicas:
            replica.bubbles.reset()
            state.deadlines.clear(PlanTimer(replica.index))
        state.digests.clear()
        self._completion.end_all(error, now)
        for replica in state.replicas:
            state.deadlines.clear(CopyTimer(replica.index))
            replica.copies.clear()
            replica.cache.reset(replica.cache.total)

    def announce(self, reason: str) -> None:
        """Tell the front end whether this server would serve, if that has changed."""
        status = self._state.engine
        engine = EngineState(ready=status.ready and not status.silent and not self._state.draining, reason=reason)
        if engine != self._announced:
            self._announced = engine
            self._state.out.add(engine)

    def _start(self) -> None:
        """Every stage is up: pools are as large as that of the smallest stage, or as configured."""
        self._failure = ""
        state, stages = self._state, list(self._up.values())
        sizes = [stage.kv_pages for stage in stages]
        slots = [stage.geometry.slots_for(stage.kv_pages) for stage in stages if stage.geometry.state_bytes]
        for replica in state.replicas:
            replica.cache.reset(
                min([*sizes, state.config.kv_pages] if state.config.kv_pages else sizes),
                slots=min(slots, default=0),
                host_pages=min(stage.host_pages for stage in stages),
                disk_pages=min(stage.disk_pages for stage in stages),
                library_pages=LIBRARY_PAGES if state.config.library_salts else 0,
            )
            layout = state.config.layout
            replica.costs.start([self._up[layout.rank(stage, replica.index)].cost for stage in range(layout.pp)])
        costs = [stage.cost for stage in stages if stage.cost is not None]
        state.engine.start(
            vocab_size=state.config.vocab_size or min(stage.vocab_size for stage in stages),
            costs=tuple(costs) if state.config.chunking == "dynamic" else (),
            cancels=all(stage.cancels for stage in stages),
            offering=tuple(rank for rank, stage in sorted(self._up.items()) if stage.offers is not None),
        )
        state.out.add(BeginEpoch(seq=state.out.next_seq(), epoch=self._epoch))
        self.announce("draining" if state.draining else "")
