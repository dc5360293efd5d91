"""The compute loop in passes of lockstep replicas, with a stub model."""

import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from headrace.core.config import EngineConfig, ModelConfig
from headrace.core.messages.orders import AnyOrder, Forward, PlanRow, ShutdownStage
from headrace.core.runtime.clock import SystemClock
from headrace.core.types.packed import pack
from headrace.core.types.ranks.coordinate import Agreement
from headrace.core.types.ranks.layout import Layout
from headrace.core.types.requests.request import SamplingParams
from headrace.engine.agreement import PassSource
from headrace.engine.load_plan import plan_rank
from headrace.engine.loop import StageLoop
from headrace.engine.orders import Inbox
from headrace.engine.outbox import ComputedPlan, EventOutbox
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.stub.runner import StubRunner
from headrace.engine.telemetry.meter import Meter

STUB = "stub:layers=2,vocab=300,max_len=64"


class Links(PipelineLinks):
    """Those of a middle stage, and what passes over them."""

    def __init__(self, runner: StubRunner) -> None:
        super().__init__(Layout(), 0, runner.hidden_spec, None, 2)
        self.first = self.last = False
        self.used: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("post_receive", "receive", "send", "broadcast", "tokens_for"):
            object.__getattribute__(self, "used").append(name)
        return object.__getattribute__(self, name)


def computed(
    loop_stage: int,
    runner: StubRunner,
    links: PipelineLinks,
    *orders: AnyOrder,
    passes: PassSource | None = None,
    meter: Meter | None = None,
) -> list[ComputedPlan]:
    with zmq.Context() as context:
        inbox: Inbox = queue.Queue()
        outbox = EventOutbox(context)
        for order in (*orders, ShutdownStage(seq=0)):
            inbox.put(order)
        StageLoop(loop_stage, runner, links, meter or Meter(loop_stage, SystemClock()), inbox, outbox, passes).run()
        done = [item for item in outbox.drain() if isinstance(item, ComputedPlan)]
        outbox.close()
        return done


@pytest.fixture
def runner() -> StubRunner:
    model = ModelConfig(model=STUB, device="cpu", dtype="float32")
    return StubRunner(plan_rank(model, EngineConfig(page_size=16, kv_pages=8)))


def row(*tokens: int) -> PlanRow:
    return PlanRow(1, 0, len(tokens), pack([0]), pack(tokens), sample=SamplingParams(temperature=0.0))


def test_a_pass_without_rows_is_reported(runner: StubRunner) -> None:
    """S4: the replica takes its part and says that it is done; its next pass is as ever."""
    idle = Forward(seq=5, rows=(), agreement=Agreement((0, 3)))
    busy = Forward(seq=9, rows=(row(1, 2, 3),), agreement=Agreement((3, 0)))
    links = PipelineLinks(Layout(), 0, runner.hidden_spec, None, 2)
    first, second = computed(4, runner, links, idle, busy)
    assert (first.done.stage, first.done.seq, first.done.samples) == (4, 5, ())
    assert (second.done.seq, len(second.done.samples)) == (9, 1)


def test_nothing_passes_between_the_stages_of_an_idle_replica(runner: StubRunner) -> None:
    """S9: no hidden state is sent or waited for, and no token: what is not sent is not waited for."""
    links = Links(runner)
    computed(0, runner, links, Forward(seq=5, rows=(), agreement=Agreement((0, 3))))
    assert links.used == []


def test_an_idle_replica_takes_the_time_of_the_busiest(runner: StubRunner) -> None:
    model = ModelConfig(model=f"{STUB},us_per_token=1000", device="cpu", dtype="float32")
    slow = StubRunner(plan_rank(model, EngineConfig(page_size=16, kv_pages=8)))
    links = PipelineLinks(Layout(), 0, slow.hidden_spec, None, 2)
    [done] = computed(0, slow, links, Forward(seq=5, rows=(), agreement=Agreement((0, 30, 10))))
    assert done.done.duration_s >= 0.03


class OtherServers:
    """Another server computes a pass before each of this one's orders, which it waits for."""

    def __init__(self, meter: Meter) -> None:
        self.joined = 0
        self.states: list[str] = []
        self._turn = 0
        self._meter = meter

    def next(self, queued: deque[AnyOrder], idle: Callable[[float | None], None]) -> AnyOrder:
        self._turn += 1
        self.states.append(self._meter._reading.state)
        if self._turn % 2:
            self.joined += 1
            return Forward(seq=0, rows=(), agreement=Agreement((0, 3)))
        return queued.popleft()


def test_passes_of_other_servers_are_not_reported(runner: StubRunner) -> None:
    """The scheduler has ordered none of them; waiting for the others is not computing."""
    meter = Meter(0, SystemClock())
    others, links = OtherServers(meter), PipelineLinks(Layout(), 0, runner.hidden_spec, None, 2)
    [done] = computed(0, runner, links, Forward(seq=9, rows=(row(1, 2, 3),)), passes=others, meter=meter)
    assert (done.done.seq, len(done.done.samples)) == (9, 1)
    assert others.joined == 2
    assert set(others.states) == {"waiting"}
