"""One server of the simulator: a real Scheduler on a simulated engine. All that it does is checked as it happens."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from headrace.core.config import SchedulerConfig
from headrace.core.messages.forecasts import ForecastMade, MakeForecast
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import BeginEpoch, Order, ReplicaOrder
from headrace.core.messages.peers import ControlServerEffect
from headrace.core.messages.replies import KvDigested, RequestFailed, RequestFinished, SchedulerReply, Tokens
from headrace.core.messages.stage_events import StageEvent, StageFailed
from headrace.core.types.errors import NONFINITE
from headrace.core.types.forecast import Forecast, LengthSamples, QueueOutlook
from headrace.core.types.kv.kv_digests import joined
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.scheduler.promises.promises import LENGTHS
from headrace.scheduler.scheduler import Effect, Event, Scheduler
from headrace.testing.engine import (
    NAN,
    NAN_TOKEN,
    EngineOptions,
    SimulatedChunk,
    SimulatedExchange,
    SimulatedPipeline,
    expected_tokens,
    kv_digest,
    kv_of,
)
from headrace.testing.guards import CopyGuard, PageGuard, PromiseGuard
from headrace.testing.tiers import SimulatedDisk
from headrace.testing.world import Channel, SchedulerDriver, World

FORECAST_S = 0.002  # mean, from an order to its forecast
FAILED_FORECASTS = 0.1


@dataclass(slots=True)
class SimulatedClient:
    """One request as its client sees it."""

    submit: Submit
    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    """Tokens that were reported."""

    ends: list[RequestFinished | RequestFailed] = field(default_factory=list)
    """How it ended; there must be exactly one end."""

    finished_early: bool = False
    """The client has ended it as complete."""

    again: bool = False
    """It is what a preempted request has had so far, posted a second time: what it is depends on the schedule."""


@dataclass(slots=True)
class SimulationReport:
    """The result of a run."""

    violations: list[str] = field(default_factory=list)
    """What was wrong; empty when every check passed."""

    outcomes: dict[str, int] = field(default_factory=dict)
    """Requests by server and finish reason or error code, as "server:reason"."""

    results: dict[tuple[str, str], tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Tokens and finish reason of every request that finished, by server and rid."""

    tier_pages: dict[str, int] = field(default_factory=dict)
    """Pages copied between tiers, by "server:tier result"."""

    digests: int = 0
    """Digests of KV that were made."""

    moves: int = 0
    """Requests that went to another prefill server, each time counted."""
    taken_along: int = 0
    """Of these, those whose KV was offered to the next prefill server."""
    actions: list[str] = field(default_factory=list)
    """What came from outside, in the order in which it was decided: by its number it can be left out."""

    events: int = 0
    seconds: float = 0.0
    """Virtual time at the end."""


class SimulatedReplica:
    """The ranks of one replica, what they were ordered, and what their pages are guarded by."""

    pipeline: SimulatedPipeline

    def __init__(self, config: SchedulerConfig, index: int) -> None:
        self.index = index
        ranks = config.layout.replica_ranks(index)
        self.guard = PageGuard(ranks, config.page_size)
        self.copy_guard = CopyGuard(ranks, config.page_size)
        self.stream: list[Order] = []


class SimulatedServer:
    """A Scheduler, its simulated engine, and what its front end sees.

    The callbacks on_output, on_peer, on_told, ship and on_restart are set by the simulation that the server is part of:
    they take replies to the front end, effects for servers that KV comes from, those for peers that it goes to, chunks
    that are sent, and the restart of the engine.
    """

    def __init__(
        self,
        world: World,
        name: str,
        config: SchedulerConfig,
        options: EngineOptions,
        report: SimulationReport,
    ) -> None:
        self.world = world
        self.name = name
        self.config = config
        self.report = report
        self._layout = config.layout
        self.replicas = [SimulatedReplica(config, index) for index in range(config.dp)]
        self.clients: dict[str, SimulatedClient] = {}
        self.on_output: Callable[[SchedulerReply], None] = lambda _output: None
        self.on_peer: Callable[[Effect], None] = lambda _effect: None
        self.on_told: Callable[[ControlServerEffect], None] = lambda _effect: None
        self.ship: Callable[[SimulatedChunk], None] = lambda _chunk: None
        self.on_restart: Callable[[], None] = lambda: None
        self.connected = 0
        """Servers that fetch KV from it."""

        self._options = options
        tiers = config.stages if options.host_pages or options.disk_pages or config.library_salts else 0
        self._disks = [[SimulatedDisk() for _ in range(tiers)] for _ in range(config.dp)]
        self._promises = PromiseGuard(config)
        self._driver = SchedulerDriver(world, Scheduler(config), self._perform_all)
        self._start()
        self._front = Channel(world, 0.001)

    @property
    def scheduler(self) -> Scheduler:
        """What decides for this server."""
        return self._driver.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Scheduler) -> None:
        self._driver.scheduler = scheduler

    def send(self, event: Event) -> None:
        """Send a message from the front end, which arrives after a delay."""
        self._front.put(lambda: self.handle(event))

    def submit(self, client: SimulatedClient) -> None:
        """Submit a client's request."""
        self.clients[client.submit.rid] = client
        self.send(client.submit)

    def handle(self, event: Event) -> None:
        """Handle an event, check it, apply its effects and plan."""
        self.report.events += 1
        if isinstance(event, StageEvent):
            replica = self.replicas[self._layout.place(event.stage).replica]
            replica.guard.event(event)
            replica.copy_guard.event(event)
        elif isinstance(event, Submit):
            self._promises.submitted(event, self.world.now)
        self._driver.handle(event)
        self._complain(self._promises.handled(event, self.world.now))

    def crash(self) -> None:
        """End a stage; the whole engine comes up again a little later."""
        self._check_streams()
        for replica in self.replicas:
            replica.pipeline.dead = True
            replica.guard.reset()
            replica.copy_guard.reset()
            for stage in replica.pipeline.stages:
                if stage.tiers is not None:
                    stage.tiers.dead = True
        self.handle(StageFailed(stage=self.config.layout.rank(0, self.config.dp - 1), message="simulated"))
        self.world.after(0.05, self._restart)

    def finish(self) -> None:
        """Check what must be true at the end of a run."""
        self._check_streams()
        if not self.scheduler.idle:
            self.violation("requests are left at the end")
        samples = self.scheduler.statistics(self.world.now).samples
        pages = {sample.labels: sample.value for sample in samples if sample.name == "kv_pages"}
        for sample in samples:
            if sample.name == "kv_tier_pages_total":
                key = f"{self.name}:{' '.join(sample.labels)}"
                self.report.tier_pages[key] = self.report.tier_pages.get(key, 0) + int(sample.value)
        if pages[("leased",)] or pages[("free",)] + pages[("cached",)] != self.config.kv_pages * self.config.dp:
            self.violation(f"pages are left at the end: {pages}")
        for replica in self.replicas:
            for stage in replica.pipeline.stages if not replica.pipeline.dead else ():
                if left := stage.left():
                    self.violation(f"rank {stage.rank} still knows requests {left}")
        self._check_no_nan_is_cached()
        self._check_cached()
        for rid, client in self.clients.items():
            if len(client.ends) != 1:
                self.violation(f"{rid} ended {len(client.ends)} times: {client.ends}")

    def violation(self, text: str) -> None:
        """Add to the report what was wrong."""
        self.report.violations.append(f"{self.world.now:.6f} {self.name}: {text}")

    def _complain(self, problem: str | None) -> None:
        if problem is not None:
            self.violation(problem)

    def _start(self) -> None:
        """Start the ranks of all replicas."""
        config = self.config
        exchange = SimulatedExchange(config.dp, self.violation) if config.lockstep and config.dp > 1 else None
        for replica in self.replicas:
            replica.stream.clear()
            replica.pipeline = SimulatedPipeline(
                self.world,
                config,
                replica.index,
                self._options,
                self.handle,
                lambda chunk: self.ship(chunk),
                self._disks[replica.index],
                exchange,
            )
            replica.pipeline.start()

    def _restart(self) -> None:
        self._start()
        self.on_restart()

    def _perform_all(self, effects: list[Effect]) -> None:
        for problem in self.scheduler.check_integrity():
            self.violation(problem)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        self._complain(self._promises.effect(effect))
        if isinstance(effect, Order):
            if isinstance(effect, ReplicaOrder):
                self._order(self.replicas[effect.replica], effect.order)
                return
            for replica in self.replicas:
                self._order(replica, effect)
        elif isinstance(effect, SchedulerReply):
            self._output(effect)
        elif isinstance(effect, MakeForecast):
            made = self._forecast(effect)
            self.world.after(FORECAST_S, lambda: self.handle(made))
        elif isinstance(effect, ControlServerEffect):
            self.on_told(effect)
        else:
            self.on_peer(effect)

    def _forecast(self, order: MakeForecast) -> ForecastMade:
        """As from copies of the scheduler, but for what they find."""
        rng = random.Random(order.seed)
        if rng.random() < FAILED_FORECASTS:
            return ForecastMade(forecast=None)
        samples = tuple(
            LengthSamples(tokens, self._options.token_s * tokens, tuple(rng.uniform(0.5, 3.0) for _ in range(4)))
            for tokens in LENGTHS
        )
        outlook = QueueOutlook(rng.random(), 1.0 + rng.random())
        made = Forecast(samples=samples, queue=outlook, one_more=None, horizon_s=60.0, steps=order.steps, took_s=0.01)
        return ForecastMade(forecast=made)

    def _order(self, replica: SimulatedReplica, order: Order) -> None:
        if problem := replica.guard.order(order) or replica.copy_guard.order(order):
            self.violation(problem)
        replica.stream.append(order)
        replica.pipeline.order(order)

    def _output(self, output: SchedulerReply) -> None:
        self._complain(self._promises.output(output, self.world.now))
        if isinstance(output, Tokens):
            self.clients[output.rid].tokens.extend(output.tokens)
        elif isinstance(output, KvDigested):
            self._check_digest(self.clients[output.rid], output)
        elif isinstance(output, RequestFinished | RequestFailed):
            client = self.clients[output.rid]
            client.ends.append(output)
            self._promises.ended(output.rid)
            if isinstance(output, RequestFinished):
                self._check_tokens(client, output)
                if not client.again:
                    self.report.results[self.name, output.rid] = (tuple(client.tokens), output.reason)
            self._check_nonfinite(client, output)
            key = output.reason if isinstance(output, RequestFinished) else output.error.code
            self.report.outcomes[f"{self.name}:{key}"] = self.report.outcomes.get(f"{self.name}:{key}", 0) + 1
        self.on_output(output)

    def _check_tokens(self, client: SimulatedClient, finished: RequestFinished) -> None:
        """The tokens are those of the model, all of them unless a full pool or the client ended it before."""
        submit = client.submit
        sampling = submit.sampling
        room = self.config.max_model_len - len(client.prompt)
        expected = expected_tokens(
            client.prompt, min(sampling.max_tokens, room), sampling.stop_token_ids, sampling.min_tokens
        )
        if not submit.route.decodes_here:
            expected = expected[:1] if _samples(submit) else []
        got = client.tokens
        full_pool = finished.reason == "length" and len(client.prompt) + len(got) > self._pool_tokens()
        if got != (expected[: len(got)] if client.finished_early or full_pool else expected):
            self.violation(f"{submit.rid} generated {got}, not {expected}")
        if finished.usage.completion_tokens != len(got):
            self.violation(f"{submit.rid} counts {finished.usage.completion_tokens} tokens, sent {len(got)}")

    def _check_digest(self, client: SimulatedClient, output: KvDigested) -> None:
        """What was digested is the KV of the prompt."""
        self.report.digests += 1
        if self._options.has_nan_token and NAN_TOKEN in client.prompt:
            return
        expected = joined([kv_digest(kv_of(client.prompt)[output.start : output.end])])
        if output.digest != expected or not output.start < output.end <= len(client.prompt):
            self.violation(f"{output.rid} has another digest of positions {output.start} to {output.end}")

    def _check_nonfinite(self, client: SimulatedClient, end: RequestFinished | RequestFailed) -> None:
        """No token is computed from NaN, and no request without NAN_TOKEN fails as nonfinite."""
        given = (*client.prompt, *client.tokens)
        if self._options.has_nan_token and client.tokens and NAN_TOKEN in given[:-1]:
            self.violation(f"{client.submit.rid} has tokens that were computed from NaN: {given}")
        failed = isinstance(end, RequestFailed) and end.error.code == NONFINITE
        if failed and not (self._options.has_nan_token and NAN_TOKEN in given):
            self.violation(f"{client.submit.rid} failed for the NaN of another request: {given}")

    def _check_no_nan_is_cached(self) -> None:
        """What requests have left in the prefix cache is finite, however they have ended."""
        for replica in self.replicas if self._options.has_nan_token else ():
            tree = self.scheduler._state.replicas[replica.index].cache._tree
            cached = [node.page for node in tree.walk()]
            for stage in replica.pipeline.stages:
                if bad := [page for page in cached if NAN in stage.pool[page]]:
                    self.violation(f"pages {bad} in the prefix cache of rank {stage.rank} hold NaN")

    def _check_cached(self) -> None:
        """What the prefix cache has is the KV of the tokens by which it is found. With tiers those are not known."""
        for replica in self.replicas:
            cache = self.scheduler._state.replicas[replica.index].cache
            states: dict[int, int] = {}  # behind the pages, by the number of the node
            for node in cache._tree.walk() if cache.tiers is None else ():
                before = states.get(node.parent.number, 0) if node.parent is not None else 0
                values = list(accumulate(unpack(node.key), self._options.extend, initial=before))[1:]
                states[node.number] = values[-1]
                for stage in replica.pipeline.stages:
                    if stage.pool[node.page] != values:
                        self.violation(f"page {node.page} in the cache of rank {stage.rank} is not of its tokens")

    def _pool_tokens(self) -> int:
        return self.config.kv_pages * self.config.page_size

    def _check_streams(self) -> None:
        """Every rank has logged the beginning of its replica's list."""
        for replica in self.replicas:
            for stage in replica.pipeline.stages:
                if stage.log != replica.stream[: len(stage.log)]:
                    self.violation(f"rank {stage.rank} logged another stream")
                if stage.log and not isinstance(stage.log[0], BeginEpoch):
                    self.violation(f"rank {stage.rank} got an order before all of its group were ready")


def _samples(submit: Submit) -> bool:
    """Whether the request computes anything."""
    route = submit.route
    if submit.open:
        return False
    return not (isinstance(route, SendTo) and route.cached) and not (isinstance(route, FetchFrom) and route.prefix)
