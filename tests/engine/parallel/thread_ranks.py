"""All ranks of a server as threads of this process: the scheduler, the streams of orders to each rank, stub models.

    scheduler ── frames ──► delivery ── orders ──► compute loop        a rank: two threads, with random delays in both
        ▲                   (OrderCheck)              │
        └────────────────── PlanDone ─────────────────┘

Ranks of a stage and replica sum over ThreadCollectives; hidden states and sampled tokens pass over PipelineLinks, for
which a World stands in for torch.distributed. Lockstep replicas meet in every pass and compare what they were told.
"""

import contextlib
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from headrace.core.config import EngineConfig, ModelConfig, SchedulerConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.orders import (
    AnyOrder,
    DropPeer,
    Forward,
    Heartbeat,
    Order,
    ReleaseRequest,
    ReplicaOrder,
    ShutdownStage,
)
from headrace.core.messages.replies import RequestFailed, RequestFinished, Tokens
from headrace.core.messages.stage_events import StageReady
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.codec import Codec
from headrace.core.types.packed import pack
from headrace.core.types.ranks.coordinate import Agreement
from headrace.core.types.ranks.layout import Layout
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.load_plan import plan_rank
from headrace.engine.loop import StageLoop
from headrace.engine.model.source import load_spec, resolve_source
from headrace.engine.orders import Inbox, OrderCheck
from headrace.engine.outbox import QueuedPlan
from headrace.engine.parallel.layer_split import ranges
from headrace.engine.parallel.offers import offer
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.stub.runner import StubRunner
from headrace.engine.telemetry.meter import Meter
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.server.launch.stage_channel import ReplicaStreams
from tests.engine.collectives.threads import Meeting, ThreadCollectives
from tests.engine.parallel.thread_world import DEADLINE_S, World

SIZES = "stub:layers=4,hidden=64,heads=4,kv_heads=2,vocab=300,max_len=128"
PAGE = 4
KV_PAGES = 60
DELAY_S = 0.002  # the longest of each delay
ORDERS: Codec[AnyOrder] = Codec(AnyOrder)


class MeetingRunner(StubRunner):
    """A stub that is delayed at random, and meets the ranks of its stage in passes of lockstep replicas."""

    def __init__(self, *arguments: Any, ep: ThreadCollectives, seed: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ep = ep
        self._delays = random.Random(seed)

    def forward(self, rows: Any, hidden: Any = None, agreement: Agreement | None = None) -> Tensor:
        self._meet(agreement)
        return super().forward(rows, hidden, agreement)

    def join(self, agreement: Agreement) -> None:
        self._meet(agreement)

    def _meet(self, agreement: Agreement | None) -> None:
        time.sleep(self._delays.random() * DELAY_S)
        if agreement is not None:
            told = torch.tensor([[*agreement.tokens, agreement.padded]])
            assert (self._ep.all_gather(told).wait() == told).all(), "ranks were told different agreements"


class ThreadRank:
    """One rank: a thread that takes orders, and one that computes."""

    def __init__(self, server: "ThreadServer", rank: int) -> None:
        self.frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.rank = rank
        self._server = server
        self._inbox: Inbox = queue.Queue()
        self._delays = random.Random(rank)
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._compute, self._deliver)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """See PlanOutbox."""

    def post(self, item: Any) -> None:
        """See PlanOutbox."""
        self._server.events.put(item)

    def end(self) -> None:
        """Wait for both threads."""
        for thread in self._threads:
            thread.join(2 * DEADLINE_S)
            assert not thread.is_alive(), f"rank {self.rank} hangs"

    def stop(self) -> None:
        """End both threads without orders."""
        self.frames.put(ORDERS.encode(ShutdownStage(seq=0)))
        self._inbox.put(ShutdownStage(seq=0))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._server.fail(self.rank, error)

    def _compute(self) -> None:
        server, layout = self._server, self._server.layout
        server.world.enter(self.rank)
        place = layout.place(self.rank)
        runner = MeetingRunner(
            plan_rank(
                ModelConfig(model=SIZES, dtype="float32", device="cpu"),
                EngineConfig(page_size=PAGE, kv_pages=KV_PAGES),
                layers=ranges([4 // layout.pp] * layout.pp)[place.stage],
                tp=layout.tp,
                shard=place.shard,
            ),
            tp=ThreadCollectives(server.meetings[layout.shards(self.rank)], place.shard),
            ep=ThreadCollectives(
                server.meetings[layout.stage_ranks(place.stage)], layout.stage_ranks(place.stage).index(self.rank)
            ),
            seed=self.rank,
        )
        runner.warm_up()
        ranks = layout.replica_ranks(place.replica)
        group: Any = ranks if len(ranks) > 1 else None
        links = PipelineLinks(layout, self.rank, runner.hidden_spec, group, server.config.credits)
        offered = offer(layout, self.rank, load_spec(resolve_source(SIZES)))
        self.post(
            StageReady(
                stage=self.rank, geometry=runner.geometry, offered=None if offered.offers else (),
                fingerprint=runner.fingerprint, data_port=1, kv_pages=KV_PAGES, vocab_size=runner.vocab_size,
            )
        )  # fmt: skip
        StageLoop(self.rank, runner, links, Meter(self.rank, SystemClock()), self._inbox, self).run()  # type: ignore[arg-type]

    def _deliver(self) -> None:
        """As the I/O thread does."""
        check = OrderCheck(self._server.layout.place(self.rank).replica)
        while True:
            frame = self.frames.get()
            time.sleep(self._delays.random() * DELAY_S)
            match order := ORDERS.decode(frame):
                case Heartbeat():
                    check.check(order)
                    continue
                case ShutdownStage():
                    self._inbox.put(order)
                    return
            check.add(frame, order)
            if isinstance(order, Forward | ReleaseRequest):
                self._inbox.put(order)


class Asked(NamedTuple):
    """A request of a test."""

    prompt: list[int]
    tokens: int
    aborted: bool = False
    """Some time after its first token, unless it has ended before."""


Damage = Callable[[list[bytes]], list[bytes]]
"""What becomes of two orders to a rank."""


class ThreadServer:
    """A scheduler and its ranks; made by serving()."""

    def __init__(self, world: World, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.world = world
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.meetings: dict[range, Meeting] = {}
        for rank in layout.ranks:
            for ranks in (layout.shards(rank), layout.stage_ranks(layout.place(rank).stage)):
                self.meetings.setdefault(ranks, Meeting(len(ranks), DEADLINE_S))
        self.failures: list[tuple[int, BaseException]] = []
        self.tokens: dict[str, list[int]] = {}
        self.passes = 0
        """Forward passes, each counted once for all replicas."""
        self._ended: set[str] = set()
        self._random = random.Random(seed)
        self._streams = ReplicaStreams(layout.dp)
        self.config = SchedulerConfig(
            page_size=PAGE, kv_pages=KV_PAGES, max_model_len=128, vocab_size=300, chunk_tokens=16, max_running=8,
            stages=layout.pp, dp=layout.dp, tp=layout.tp, lockstep=layout.dp > 1,
        )  # fmt: skip
        self._scheduler = Scheduler(self.config)
        self._damaged: tuple[int, int, Damage] = (-1, 0, list)
        self._struck = False
        self._sent: Counter[int] = Counter()
        self._ranks = [ThreadRank(self, rank) for rank in layout.ranks]
        for each in self._ranks:
            each.start()

    def damage(self, rank: int, number: int, damage: Damage) -> None:
        """Damage the order of this number to a rank, and one behind it that changes nothing; a heartbeat follows."""
        self._damaged = (rank, number, damage)

    def fail(self, rank: int, error: BaseException) -> None:
        """By a rank: it has failed, and all others end with it."""
        self.failures.append((rank, error))
        self.events.put(error)
        self.world.leave(f"rank {rank} has failed")
        for meeting in self.meetings.values():
            meeting.leave(f"rank {rank} has failed")
        for each in self._ranks:
            each.stop()

    def serve(self, asked: Sequence[Asked]) -> None:
        """Ask all of them at random moments, and wait until all have ended, or a rank has failed."""
        waiting = list(enumerate(asked))
        for _ in self.layout.ranks:
            ready = self.events.get(timeout=DEADLINE_S)
            assert isinstance(ready, StageReady), ready
            self._take(ready)
        until = time.monotonic() + 2 * DEADLINE_S
        while len(self._ended) < len(asked) and not self.failures:
            assert time.monotonic() < until, f"{len(self._ended)} of {len(asked)} have ended"
            if waiting and self._random.random() < 0.4:
                number, each = waiting.pop(0)
                self._submit(str(number), each)
            for rid, tokens in self.tokens.items():
                if asked[int(rid)].aborted and tokens and rid not in self._ended and self._random.random() < 0.3:
                    self._do(self._scheduler.handle(Abort(rid=rid), time.monotonic()))
            with contextlib.suppress(queue.Empty):
                self._take(self.events.get(timeout=0.01))
            if (due := self._scheduler.next_deadline()) is not None and due <= time.monotonic():
                self._do(self._scheduler.tick(time.monotonic()))
            while any(isinstance(order, Forward) for order in self._do(self._scheduler.plan(time.monotonic()))):
                pass
            if self._random.random() < 0.2:
                self.heartbeats()

    def end(self) -> None:
        """End all ranks, once they have done what they were told."""
        for rank in self._ranks:
            rank.frames.put(ORDERS.encode(ShutdownStage(seq=0)))
        for rank in self._ranks:
            rank.end()

    def _submit(self, rid: str, asked: Asked) -> None:
        self.tokens[rid] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.tokens)
        self._do(
            self._scheduler.handle(Submit(rid=rid, prompt=pack(asked.prompt), sampling=sampling), time.monotonic())
        )

    def _take(self, item: Any) -> None:
        if isinstance(item, BaseException):
            return  # see failures
        event = item.computed().done if isinstance(item, QueuedPlan) else item
        self._do(self._scheduler.handle(event, time.monotonic()))

    def _do(self, effects: Sequence[Effect]) -> list[Order]:
        """Send the orders among effects; returns them."""
        orders: list[Order] = []
        for effect in effects:
            match effect:
                case ReplicaOrder():
                    orders.append(effect.order)
                    self.passes += isinstance(effect.order, Forward) and effect.replica == 0
                    self._send((effect.replica,), effect.order)
                case Order():
                    orders.append(effect)
                    self.passes += isinstance(effect, Forward)
                    self._send(range(self.layout.dp), effect)  # type: ignore[arg-type]
                case Tokens():
                    self.tokens[effect.rid] += effect.tokens
                case RequestFinished() | RequestFailed():
                    self._ended.add(effect.rid)
                case _:
                    pass
        if self._struck:  # once both replicas have their orders of a pass
            self._struck = False
            self.heartbeats()
        return orders

    def _send(self, replicas: Sequence[int], order: AnyOrder) -> None:
        frames = [self._log(replicas, order)]
        ranks = [rank for replica in replicas for rank in self.layout.replica_ranks(replica)]
        self._sent.update(ranks)
        damaged, number, damage = self._damaged
        struck = damaged in ranks and self._sent[damaged] == number
        if struck:
            frames.append(self._log(replicas, DropPeer(seq=0, session="any")))
        for rank in ranks:
            own = damage(frames) if struck and rank == damaged else frames
            for frame in own:
                self._ranks[rank].frames.put(frame)
        self._struck |= struck

    def _log(self, replicas: Sequence[int], order: AnyOrder) -> bytes:
        frame = ORDERS.encode(order)
        self._streams.add(replicas, frame, order)
        return frame

    def heartbeats(self) -> None:
        """One to each rank."""
        for rank in self._ranks:
            rank.frames.put(ORDERS.encode(self._streams.heartbeat(self.layout.place(rank.rank).replica)))


@contextlib.contextmanager
def serving(layout: Layout, seed: int) -> Iterator[ThreadServer]:
    """A server for the length of a with block, after which its ranks are ended."""
    world = World()
    with patch("headrace.engine.parallel.carriers.dist", world):
        server = ThreadServer(world, layout, seed)
        try:
            yield server
            server.heartbeats()
        finally:
            server.end()
