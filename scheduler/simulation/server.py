"""One server of the simulator: a real Scheduler on a simulated engine, with everything it does checked on the way."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import RequestFailed, RequestFinished, SchedulerReply, Submit, Tokens
from headrace.core.messages.orders import BeginEpoch, Forward, Order, PrepareReceive, SendChunk
from headrace.core.messages.stage_events import ChunkAcked, KvReceived, ReceiveCancelled, SendCancelled, StageFailed
from headrace.core.types.packed import unpack
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.scheduler.simulation.engine import Channel, SimulatedChunk, SimulatedPipeline, World
from headrace.scheduler.simulation.model import expected_tokens


@dataclass(slots=True)
class SimulatedClient:
    """One request as its client sees it."""

    submit: Submit
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    ends: list[RequestFinished | RequestFailed] = field(default_factory=list)
    finished_early: bool = False


@dataclass(slots=True)
class SimulationReport:
    """What came of a run. violations: empty when everything held. results: tokens and reason of every request that
    finished, by server and rid."""

    violations: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    results: dict[tuple[str, str], tuple[tuple[int, ...], str]] = field(default_factory=dict)
    events: int = 0
    seconds: float = 0.0


class PageGuard:
    """Watches one server's orders and events: pages that bytes may still touch are not given to anybody else."""

    def __init__(self, stages: int, page_size: int) -> None:
        self._stages = stages
        self._page_size = page_size
        self._held: dict[int, set[int]] = {}
        self._open: dict[int, set[tuple[int, int]]] = {}
        self._requests: dict[tuple[str, str, int], int] = {}
        self._owners: dict[int, int] = {}

    def order(self, order: Order) -> str | None:
        """Note an order; say what it violates."""
        if isinstance(order, Forward):
            for row in order.rows:
                written = set(unpack(row.pages)[row.start // self._page_size :])
                self._owners.update(dict.fromkeys(written, row.request))
                if problem := self._clash(row.request, written):
                    return problem
        elif isinstance(order, PrepareReceive):
            pages = set(unpack(order.pages))
            if problem := self._clash(order.request, pages):
                return problem
            self._requests[order.session, order.ticket, order.generation] = order.request
            self._owners.update(dict.fromkeys(pages, order.request))
            self._hold(order.request, pages, {(stage, -1) for stage in range(self._stages)})
        elif isinstance(order, SendChunk):
            self._hold(order.request, set(unpack(order.pages)), {(stage, order.chunk) for stage in range(self._stages)})
        return None

    def written(self, send: SendChunk) -> str | None:
        """A prefill server has written into our pages by itself; say what that violates."""
        request = self._requests.get((send.session, send.ticket, send.generation))
        others = {owner for page in unpack(send.dst_pages) if (owner := self._owners.get(page)) != request}
        return f"{send.ticket} was written into pages of requests {others}" if others else None

    def event(self, event: Event) -> None:
        """Acknowledged, arrived or promised not to be touched again."""
        if isinstance(event, ChunkAcked):
            self._free(event.request, {(event.stage, event.chunk)})
        elif isinstance(event, KvReceived):
            self._free(event.request, {(event.stage, -1)})
        elif isinstance(event, SendCancelled | ReceiveCancelled):
            mine = {entry for entry in self._open.get(event.request, set()) if entry[0] == event.stage}
            self._free(event.request, mine)

    def reset(self) -> None:
        """The engine is gone, and all bytes with it."""
        self._held.clear()
        self._open.clear()

    def _clash(self, request: int, pages: set[int]) -> str | None:
        for other, held in self._held.items():
            if other != request and held & pages:
                return f"request {request} is given pages {held & pages} that bytes of {other} may still touch"
        return None

    def _hold(self, request: int, pages: set[int], entries: set[tuple[int, int]]) -> None:
        self._held.setdefault(request, set()).update(pages)
        self._open.setdefault(request, set()).update(entries)

    def _free(self, request: int, entries: set[tuple[int, int]]) -> None:
        if request in self._open:
            self._open[request] -= entries
            if not self._open[request]:
                del self._open[request], self._held[request]


class SimulatedServer:
    """A Scheduler, its simulated engine, and its front end's view. dial and control endpoint: where peers' effects
    go."""

    def __init__(
        self, world: World, name: str, config: SchedulerConfig, token_s: float, report: SimulationReport
    ) -> None:
        self.world = world
        self.name = name
        self.config = config
        self.report = report
        self.scheduler = Scheduler(config)
        self.guard = PageGuard(config.stages, config.page_size)
        self.clients: dict[str, SimulatedClient] = {}
        self.on_output: Callable[[SchedulerReply], None] = lambda _output: None
        self.on_peer: Callable[[Effect], None] = lambda _effect: None
        self.ship: Callable[[SimulatedChunk], None] = lambda _chunk: None
        self.on_restart: Callable[[], None] = lambda: None
        self._token_s = token_s
        self._tick_at: float | None = None
        self._stream: list[Order] = []
        self.pipeline = self._new_pipeline()
        self._front = Channel(world, 0.001)

    def intake(self, event: Event) -> None:
        """SendChunk something from the front end."""
        self._front.put(lambda: self.handle(event))

    def submit(self, client: SimulatedClient) -> None:
        self.clients[client.submit.rid] = client
        self.intake(client.submit)

    def handle(self, event: Event) -> None:
        self.report.events += 1
        self.guard.event(event)
        self._apply(self.scheduler.handle(event, self.world.now))

    def crash(self) -> None:
        """A stage dies; the whole engine comes up anew a little later."""
        self._check_streams()
        self.pipeline.dead = True
        self.guard.reset()
        self.handle(StageFailed(stage=0, message="simulated"))
        self.world.after(0.05, self._restart)

    def finish(self) -> None:
        """Check what must be true when nothing happens any more."""
        self._check_streams()
        if not self.scheduler.idle:
            self.violation("requests are left at the end")
        pages = {sample.labels: sample.value for sample in self.scheduler.statistics().samples if sample.labels}
        if pages[("leased",)] or pages[("free",)] + pages[("cached",)] != self.config.kv_pages:
            self.violation(f"pages are left at the end: {pages}")
        for rid, client in self.clients.items():
            if len(client.ends) != 1:
                self.violation(f"{rid} ended {len(client.ends)} times: {client.ends}")

    def violation(self, text: str) -> None:
        self.report.violations.append(f"{self.world.now:.6f} {self.name}: {text}")

    def _new_pipeline(self) -> SimulatedPipeline:
        config = self.config
        pipeline = SimulatedPipeline(
            self.world,
            config.stages,
            config.kv_pages,
            config.page_size,
            self._token_s,
            self.handle,
            lambda chunk: self.ship(chunk),
        )
        pipeline.start(config.kv_pages, config.page_size)
        return pipeline

    def _restart(self) -> None:
        self._stream.clear()
        self.pipeline = self._new_pipeline()
        self.on_restart()

    def _apply(self, effects: list[Effect]) -> None:
        self._perform_all(effects)
        while effects := self.scheduler.plan(self.world.now):
            self._perform_all(effects)
        self._arm()

    def _perform_all(self, effects: list[Effect]) -> None:
        for problem in self.scheduler.check_integrity():
            self.violation(problem)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Order):
            if problem := self.guard.order(effect):
                self.violation(problem)
            self._stream.append(effect)
            self.pipeline.obey(effect)
        elif isinstance(effect, SchedulerReply):
            self._output(effect)
        else:
            self.on_peer(effect)

    def _output(self, output: SchedulerReply) -> None:
        if isinstance(output, Tokens):
            self.clients[output.rid].tokens.extend(output.tokens)
        elif isinstance(output, RequestFinished | RequestFailed):
            client = self.clients[output.rid]
            client.ends.append(output)
            if isinstance(output, RequestFinished):
                self._check_tokens(client, output)
                self.report.results[self.name, output.rid] = (tuple(client.tokens), output.reason)
            key = output.reason if isinstance(output, RequestFinished) else output.error.code
            self.report.outcomes[f"{self.name}:{key}"] = self.report.outcomes.get(f"{self.name}:{key}", 0) + 1
        self.on_output(output)

    def _check_tokens(self, client: SimulatedClient, finished: RequestFinished) -> None:
        """The tokens are those of the model, all of them unless the pool or the owner ended it before."""
        submit = client.submit
        sampling = submit.sampling
        room = self.config.max_model_len - len(client.prompt)
        expected = expected_tokens(
            client.prompt, min(sampling.max_tokens, room), sampling.stop_token_ids, sampling.min_tokens
        )
        if not submit.route.decodes_here:
            expected = expected[:1]
        got = client.tokens
        full_pool = finished.reason == "length" and len(client.prompt) + len(got) > self._pool_tokens()
        if got != (expected[: len(got)] if client.finished_early or full_pool else expected):
            self.violation(f"{submit.rid} generated {got}, not {expected}")
        if finished.usage.completion_tokens != len(got):
            self.violation(f"{submit.rid} counts {finished.usage.completion_tokens} tokens, sent {len(got)}")

    def _pool_tokens(self) -> int:
        return self.config.kv_pages * self.config.page_size

    def _arm(self) -> None:
        """Have tick() called at the next deadline."""
        deadline = self.scheduler.next_deadline()
        if deadline is None or (self._tick_at is not None and self._tick_at <= deadline):
            return
        self._tick_at = deadline
        self.world.at(deadline, lambda: self._tick(deadline))

    def _tick(self, at: float) -> None:
        if self._tick_at != at:
            return  # an earlier one has taken its place
        self._tick_at = None
        self._apply(self.scheduler.tick(self.world.now))
        self._arm()

    def _check_streams(self) -> None:
        """Every stage has logged the beginning of the same list."""
        for stage in self.pipeline.stages:
            if stage.log != self._stream[: len(stage.log)]:
                self.violation(f"stage {stage.index} logged another stream")
            if stage.log and not isinstance(stage.log[0], BeginEpoch):
                self.violation(f"stage {stage.index} was ordered about before all of its group were ready")
