"""A GPU that never gets done, since another rank is gone: LinkBroken in time, and the end of a stage as on the CPU."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import zmq

from headrace.core.config import EngineConfig, ModelConfig, StageConfig, TransferConfig
from headrace.core.messages.orders import Forward, PlanRow, ShutdownStage
from headrace.core.messages.stage_events import StageFailed
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.progress import PassProgress
from headrace.core.types.packed import pack
from headrace.core.types.ranks.layout import Layout
from headrace.engine import stage
from headrace.engine.collectives.operations import LinkBroken
from headrace.engine.collectives.watch import OperationWatch
from headrace.engine.loop import StageLoop
from headrace.engine.orders import Inbox
from headrace.engine.outbox import ComputedPlan, DeviceLinks, DeviceOutbox, EventOutbox, QueuedPlan
from headrace.engine.parallel.pipeline import PipelineLinks
from headrace.engine.runner import HiddenSpec
from headrace.engine.telemetry.meter import Meter
from tests.engine.collectives.test_watch import Work

DEVICE = torch.device("cuda:0")
TIMEOUT_S = 0.4
LONG_S = 30.0


class Event:
    """Of a device that gets done when it is told to."""

    done = threading.Event()

    def __init__(self, **_: object) -> None: ...

    def record(self, _: object) -> None: ...

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(LONG_S)

    def elapsed_time(self, _: object) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Sets how far the device is."""
    monkeypatch.setattr(Event, "done", threading.Event())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    yield Event.done
    Event.done.set()


class Bench:
    """A stage's outbox, and what it tells."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", timeout_s: float = TIMEOUT_S) -> None:
        self.events = EventOutbox(context)
        self.meter = Meter(0, SystemClock())
        self.watch = OperationWatch()
        self.inbox: Inbox = queue.Queue()
        self.aborted = threading.Event()
        links = DeviceLinks(self.watch, timeout_s, self.inbox.put, self.abort)
        self.outbox = DeviceOutbox(self.events, DEVICE, self.meter, links)

    def abort(self) -> None:
        """As of NCCL: the device goes on, without a result."""
        assert not self.aborted.is_set(), "once"
        self.aborted.set()
        Event.done.set()

    def begin(self, seq: int) -> None:
        self.meter.begin(Forward(seq=seq, rows=()))
        self.meter.mark()
        self.outbox.begin()

    def run(self, seq: int) -> None:
        """Queue a plan."""
        self.begin(seq)
        self.meter.mark()
        run, seconds = self.meter.end()
        self.outbox.post(QueuedPlan(run, 0, seconds))

    def reported(self, timeout_s: float = LONG_S) -> list[Any]:
        self.events.reader.poll(int(timeout_s * 1e3))
        return list(self.events.drain())

    def broken(self) -> str:
        """What the compute thread is told."""
        error = self.inbox.get(timeout=LONG_S)
        assert isinstance(error, LinkBroken)
        assert self.aborted.wait(LONG_S)
        return str(error)


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def bench(context: "zmq.Context[zmq.Socket[bytes]]") -> Iterator[Bench]:
    made = Bench(context)
    yield made
    Event.done.set()
    made.outbox.close()


def test_a_plan_that_does_not_end_names_what_it_waits_for_and_for_how_long(bench: Bench) -> None:
    bench.watch.add("all_reduce", "tp", Work())
    bench.watch.add("broadcast", "tokens", Work(done=True))
    started = time.monotonic()
    bench.run(7)
    assert bench.broken() == "plan 7 is not done in 0.4 s; under way on the device: all_reduce of tp"
    assert TIMEOUT_S <= time.monotonic() - started < LONG_S / 2


def test_after_that_plans_are_not_reported_and_failures_are(bench: Bench) -> None:
    """The device goes on when it is aborted, with numbers of no meaning."""
    bench.run(7)
    bench.run(8)
    bench.broken()
    bench.run(9)
    bench.outbox.post(StageFailed(stage=0, message="as told"))
    assert bench.reported() == [StageFailed(stage=0, message="as told")]


def test_an_operation_that_fails_is_noticed_before_the_timeout(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    bench = Bench(context, timeout_s=LONG_S)
    bench.watch.add("all_reduce", "tp", work := Work())
    bench.run(7)
    work.error = "remote process exited"
    assert bench.broken() == "plan 7 cannot end: all_reduce of tp has failed: remote process exited"
    bench.outbox.close()


def test_a_compute_thread_that_waits_for_the_device_within_a_plan_is_freed(bench: Bench) -> None:
    """Such as for how many rows each rank gets: the plan is never queued as a whole."""
    bench.watch.add("all_to_all", "ep", Work())
    bench.begin(7)
    Event().synchronize()  # until the abort
    assert bench.broken() == "plan 7 is not done in 0.4 s; under way on the device: all_to_all of ep"


def test_a_rank_without_a_plan_waits_for_nothing(bench: Bench, device: threading.Event) -> None:
    device.set()
    bench.run(7)
    [done] = bench.reported()
    assert isinstance(done, ComputedPlan)
    bench.watch.add("receive from rank 0", "hidden states", Work())
    time.sleep(2 * TIMEOUT_S)
    assert bench.inbox.empty()


def test_the_time_of_a_plan_begins_with_the_end_of_the_one_before(
    context: "zmq.Context[zmq.Socket[bytes]]", device: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three plans queued at once that take 0.5 s each, of 1 s that each may take."""
    bench = Bench(context, timeout_s=1.0)
    ends = iter([time.monotonic() + 0.5 * (number + 1) for number in range(3)])
    until = [next(ends)]

    def query(_: Event) -> bool:
        if time.monotonic() < until[0]:
            return False
        until[0] = next(ends, until[0])
        return True

    monkeypatch.setattr(Event, "query", query)
    for seq in (1, 2, 3):
        bench.run(seq)
    found = [item.done.seq for _ in range(3) for item in bench.reported(timeout_s=5)]
    assert found == [1, 2, 3]
    assert bench.inbox.empty()
    bench.outbox.close()


CONFIG = StageConfig(
    rank=1, endpoint="", layout=Layout(2, 1, 1), model=ModelConfig(), engine=EngineConfig(), transfer=TransferConfig()
)


class _Runner:
    """Of a device that queues without an end."""

    hidden_spec = HiddenSpec(2, torch.float32, torch.device("cpu"))
    progress = PassProgress()

    def forward(self, rows: Any, *_: object) -> torch.Tensor:
        return torch.zeros(len(rows), 2)

    def sample(self, *_: object) -> None: ...


def stage_loop(bench: Bench) -> StageLoop:
    links = PipelineLinks(Layout(), 0, _Runner.hidden_spec, None, 2)
    return StageLoop(1, cast(Any, _Runner()), links, bench.meter, bench.inbox, bench.outbox)


@pytest.mark.parametrize("told", [False, True], ids=["the first to know", "told by the supervisor"])
def test_the_stage_ends_as_on_the_cpu(bench: Bench, told: bool) -> None:
    """The compute thread is idle when it is told; it reports the failure unless the supervisor has ended the group."""
    bench.watch.add("all_reduce", "tp", Work())
    bench.inbox.put(Forward(seq=7, rows=(PlanRow(1, 0, 1, pack([0]), pack([1])),)))
    if told:
        threading.Timer(2 * TIMEOUT_S, bench.inbox.put, [ShutdownStage(seq=8)]).start()
    status = stage._compute(stage_loop(bench), CONFIG, bench.outbox, shutdown_wait_s=LONG_S if told else 0.05)
    if told:
        assert status == 0
        return
    assert status == 1
    failed = bench.reported()
    failed += bench.reported() if len(failed) < 2 else []
    message = (
        "the link to another stage is broken: plan 7 is not done in 0.4 s; under way on the device: all_reduce of tp"
    )
    assert failed == [StageFailed(stage=1, message=message), ShutdownStage(seq=0)]
