"""A scheduler on modelled stages in virtual time, whose state a twin can be made of at any time."""

import random
from collections.abc import Callable

from msgspec.structs import replace

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Submit
from headrace.core.messages.orders import Order, ReplicaOrder
from headrace.core.messages.peers import PeerJoined, PeerReserved
from headrace.core.messages.replies import RequestFinished, Tokens
from headrace.core.messages.stage_events import AnyStageEvent, PlanDone, StageReady
from headrace.core.types.kv.geometry import Geometry, ceil_div
from headrace.core.types.packed import pack
from headrace.core.types.peers.session_terms import PeerTerms
from headrace.core.types.requests.request import AnyRoute, Discard, SamplingParams, SendTo
from headrace.core.types.requests.reservation import Reservation
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.scheduler.twin.pipeline import TimedHostTier, TimedPipeline
from headrace.scheduler.twin.world import SchedulerDriver, World

COST: Cost = (1e-9, 1e-4, 5e-3)
VOCABULARY = 1 << 20


def config(**changes: object) -> SchedulerConfig:
    settings: dict[str, object] = {
        "page_size": 16,
        "kv_pages": 4096,
        "chunk_tokens": 512,
        "promise": "p99",
        "max_queued_tokens": 1 << 30,
        "max_queued_requests": 1 << 20,
    }
    return SchedulerConfig(**(settings | changes))  # type: ignore[arg-type]


class Driven:
    """One scheduler, its stages, and a peer that takes all that is sent."""

    def __init__(self, costs: tuple[Cost, ...] = (COST,), seed: int = 0, **changes: object) -> None:
        self.config = config(stages=len(costs), **changes)
        self.world = World(seed)
        self.scheduler = Scheduler(self.config)
        self.driver = SchedulerDriver(self.world, self.scheduler, self._perform)
        self.first_token: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self.submitted: dict[str, float] = {}
        self.drawing = random.Random(f"requests {seed}")  # not what a twin draws
        layout = self.config.layout

        def pipeline(replica: int) -> TimedPipeline:
            def report(event: AnyStageEvent) -> None:
                for rank in reversed(layout.shards(layout.rank(event.stage, replica))):
                    samples = {"samples": ()} if isinstance(event, PlanDone) and rank % layout.tp else {}
                    self.driver.handle(replace_stage(event, rank, samples))

            tiers = TimedHostTier(self.world, len(costs), self.config.page_size, None, report)
            return TimedPipeline(self.world, costs, None, tiers, report)

        self.pipelines = [pipeline(replica) for replica in range(layout.dp)]
        geometry = Geometry("float32", 1, 1, 1, self.config.page_size)
        for rank in layout.ranks:
            ready = StageReady(
                stage=rank,
                geometry=geometry,
                fingerprint="f",
                data_port=1,
                kv_pages=self.config.kv_pages,
                vocab_size=VOCABULARY,
                cost=costs[layout.place(rank).stage],
            )
            self.driver.handle(ready)
        terms = PeerTerms(session="peer", geometries=(geometry,), window_bytes=1 << 30)
        self.driver.handle(PeerJoined(name="peer", terms=terms))

    def submit(self, rid: str, tokens: int, route: AnyRoute | None = None, max_tokens: int = 1) -> None:
        """A prompt that no other begins with comes now."""
        route = Discard() if route is None else route
        if isinstance(route, SendTo):
            pages = pack(range(ceil_div(tokens, self.config.page_size)))
            reservation = Reservation(
                ticket=route.ticket, generation=1, prompt_tokens=tokens, cached_tokens=0, pages=pages, row=0
            )
            self.driver.handle(PeerReserved(session="peer", reservation=reservation))
        head = [self.drawing.randrange(VOCABULARY) for _ in range(min(4, tokens))]
        prompt = pack(head) + bytes(4 * (tokens - len(head)))
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.submitted[rid] = self.world.now
        self.driver.handle(Submit(rid=rid, prompt=prompt, sampling=sampling, route=route))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.world.now + seconds
        while (at := self.world.next_at) is not None and at <= end:
            self.world.step()
        self.world.now = end

    def run_until(self, done: Callable[[], bool]) -> None:
        while not done():
            assert self.world.step(), "nothing happens any more"

    def ttft_s(self, rid: str) -> float:
        """Run on until a request has its first token."""
        self.run_until(lambda: rid in self.first_token)
        return self.first_token[rid] - self.submitted[rid]

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ReplicaOrder():
                    self.pipelines[effect.replica].order(effect.order)
                case Order():
                    for each in self.pipelines:
                        each.order(effect)
                case Tokens():
                    self.first_token.setdefault(effect.rid, self.world.now)
                case RequestFinished():
                    self.finished[effect.rid] = self.world.now
                case _:
                    pass


def replace_stage(event: AnyStageEvent, rank: int, changes: dict[str, object]) -> AnyStageEvent:
    return replace(event, stage=rank, **changes)
