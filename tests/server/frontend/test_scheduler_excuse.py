"""A scheduler that does not answer: stopped, busy or dead, by what its process does. Virtual time."""

import time

import pytest

from headrace.core.messages.frontend import QueryStats
from headrace.core.runtime.clock import VirtualClock
from headrace.core.runtime.liveness import Activity
from headrace.server.frontend.link.scheduler_client import LATE_S, LOST_S, PROBE_S, SILENT_S, SUSPECT_S, SchedulerClient
from tests.server.fakes import FakeLink, in_loop

HANG_S = 60.0


class Machine:
    """What the scheduler's process does; time passes by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.activity: Activity | None = Activity(0.0, 0.0)
        self.link = FakeLink(answers_probes=False)
        self.client = SchedulerClient(self.link, self.clock, inspect=lambda: self.activity, hang_s=HANG_S)

    async def start(self) -> None:
        self.client.start()
        await self.link.wait_for(QueryStats)


def block(seconds: float) -> None:
    """Keep the event loop from running."""
    time.sleep(seconds)


@pytest.mark.parametrize(
    ("activity", "said"),
    [
        (Activity(0.0, 0.0, stopped=True), "the scheduler is stopped (SIGSTOP) for "),
        (Activity(0.0, 0.0, runnable=True), "the machine is overloaded, run delay "),
        (Activity(0.0, 0.0, disk=True), "it waits for a disk or for swap"),
    ],
    ids=["stopped", "runnable", "disk"],
)
@in_loop
async def test_one_that_cannot_answer_is_alive_and_not_ready_up_to_the_bound(activity: Activity, said: str) -> None:
    machine = Machine()
    await machine.start()
    assert machine.client.excuse() is None
    machine.activity = activity
    machine.clock.advance(SUSPECT_S + 0.1)
    assert (machine.client.excuse() is not None) == activity.stopped, "a stopped one is known at once"
    while machine.clock.now() < HANG_S - 5:
        machine.clock.advance(1.0)
        machine.client.excuse()
    assert machine.client.problem() is None
    assert said in (machine.client.excuse() or "")
    machine.clock.advance(10.0)
    assert said in (machine.client.problem() or "")
    await machine.client.stop()


@in_loop
async def test_one_that_could_answer_is_dead_as_before() -> None:
    machine = Machine()
    await machine.start()
    machine.clock.advance(SILENT_S + 0.1)
    assert machine.client.problem() == "the scheduler has been silent for 5.1 s"
    await machine.client.stop()


@in_loop
async def test_a_front_end_that_was_stopped_listens_before_it_judges() -> None:
    """A request is handled before the loop has read what the scheduler said meanwhile."""
    machine = Machine()
    await machine.start()
    machine.clock.advance(LOST_S)
    assert machine.client.problem() is not None
    block(PROBE_S + LATE_S + 0.05)  # the probe's timer is due, and has not run
    assert machine.client.problem() is None
    assert machine.client.excuse() is None
    await machine.client.stop()
