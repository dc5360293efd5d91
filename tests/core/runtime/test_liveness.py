"""Silence is judged by what the silent process could have done."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.runtime.clock import TOLERANCE_S, LoopClock, VirtualClock
from headrace.core.runtime.event_loop import EventLoop
from headrace.core.runtime.liveness import Activity, Cause, Finding, Limits, Silence, read_activity

LIMITS = Limits(silence_s=3.0, hang_s=60.0)
COMPUTES = """\
import sys, threading
def compute():
    while True:
        pass
sys.stdin.readline()
threading.Thread(target=compute).start()
"""
SLEEPS = Activity(5.0, 1.0)


def looks(
    silence: Silence, seconds: int, activity: Activity | None, *, cpu: float = 0.0, delay: float = 0.0
) -> Finding:
    """Look once a second from second 1 on. cpu, delay: by which each grows in a second."""
    found = silence.look(0.25, activity)
    for second in range(1, seconds + 1):
        if activity is not None:
            activity = activity._replace(cpu_s=activity.cpu_s + cpu, delay_s=activity.delay_s + delay)
        found = silence.look(float(second), activity)
        if found.hung:
            break
    return found


def asked() -> Silence:
    silence = Silence(LIMITS, 0.0)
    silence.asked(0.0)
    return silence


def test_one_that_could_have_answered_is_dead_after_its_silence() -> None:
    found = looks(asked(), 20, SLEEPS)
    assert (found.hung, found.cause, found.text) == (True, Cause.IDLE, "has been silent for 4.0 s")


def test_of_one_on_another_machine_only_the_silence_counts() -> None:
    found = looks(asked(), 20, None)
    assert (found.hung, found.cause, found.silent_s) == (True, Cause.UNKNOWN, 4.0)


@pytest.mark.parametrize(
    ("activity", "cpu", "delay", "cause", "text"),
    [
        (SLEEPS._replace(stopped=True), 0, 0, Cause.STOPPED, "is stopped (SIGSTOP) for 12.0 s"),
        (SLEEPS, 1.0, 0, Cause.COMPUTING, "has been silent for 12.0 s: computing for 11.8 s"),
        (SLEEPS, 0.1, 0.9, Cause.OVERLOADED, "has been silent for 12.0 s: the machine is overloaded, run delay 8"),
        (SLEEPS._replace(runnable=True), 0, 0, Cause.OVERLOADED, ""),
        (SLEEPS._replace(disk=True), 0, 0, Cause.DISK, "has been silent for 12.0 s: it waits for a disk or for swap"),
    ],
    ids=["stopped", "computing", "run delay", "runnable", "disk"],
)
def test_one_that_could_not_answer_is_waited_for_and_not_for_ever(
    activity: Activity, cpu: float, delay: float, cause: Cause, text: str
) -> None:
    found = looks(asked(), 12, activity, cpu=cpu, delay=delay)
    assert (found.hung, found.cause) == (False, cause)
    assert text in found.text
    assert looks(asked(), 59, activity, cpu=cpu, delay=delay).hung is False
    assert looks(asked(), 70, activity, cpu=cpu, delay=delay).hung is True


def test_one_that_was_stopped_and_goes_on_has_all_the_time_that_it_had() -> None:
    silence = asked()
    silence.look(1.0, SLEEPS)
    for second in range(2, 30):
        assert not silence.look(float(second), SLEEPS._replace(stopped=True)).hung
    assert silence.look(30.0, SLEEPS).charged_s == 1.0, "it was stopped in a part of the interval"
    assert not silence.look(31.5, SLEEPS).hung
    assert silence.look(33.0, SLEEPS).hung


def test_time_without_a_question_is_not_silence() -> None:
    silence = Silence(LIMITS, 0.0)
    silence.asked(50.0)
    assert silence.look(51.0, SLEEPS).charged_s == 1.0
    silence.heard(52.0)
    assert not silence.asking


ACTIVITIES = st.one_of(
    st.none(),
    st.builds(
        Activity,
        st.floats(0, 100),
        st.floats(0, 100),
        stopped=st.booleans(),
        runnable=st.booleans(),
        disk=st.booleans(),
    ),
)


@given(st.lists(st.tuples(st.floats(0.01, 5), ACTIVITIES), min_size=1, max_size=40), st.integers(0, 40))
def test_whatever_is_seen_a_hang_ends_and_no_silence_is_charged_twice(
    steps: list[tuple[float, Activity | None]], heard: int
) -> None:
    """Dead when and only when a limit is exceeded; never before silence_s have passed, always after hang_s."""
    silence, now, since = asked(), 0.0, 0.0
    for index, (seconds, activity) in enumerate(steps):
        now += seconds
        if index == heard:
            silence.heard(now)
            silence.asked(now)
            since = now
        found = silence.look(now, activity)
        assert found.silent_s == pytest.approx(now - since)
        assert -1e-9 <= found.charged_s <= found.silent_s + 1e-6
        assert found.hung == (found.charged_s > LIMITS.silence_s or found.silent_s > LIMITS.hang_s)
        assert found.text


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=60))
def test_the_clock_of_a_loop_leaves_pauses_out(turns: list[tuple[float, float]]) -> None:
    """Each turn: seconds that pass, seconds that the loop meant to wait."""
    machine = VirtualClock(7.0)
    clock = LoopClock(machine)
    before, expected = clock.now(), 7.0
    for passes, waits in turns:
        clock.wait(waits)
        machine.advance(passes)
        now = clock.now()
        expected += passes if passes <= waits + TOLERANCE_S else TOLERANCE_S
        assert before <= now <= before + waits + TOLERANCE_S + 1e-6
        assert now == pytest.approx(expected)
        before = now
    assert clock.paused_s == pytest.approx(machine.now() - clock.now())


class Judge:
    """An EventSource that judges whoever was not heard for 3 s. heard: when, in the time that it is given."""

    def __init__(self) -> None:
        self.heard = 0.0
        self.inbox: list[str] = []

    def sockets(self) -> tuple[int, ...]:
        return (1,)

    def receive(self, now: float) -> list[str]:
        self.inbox.clear()
        self.heard = now
        return []

    def tick(self, now: float) -> list[str]:
        return [f"silent for {now - self.heard:.2f} s"]

    def next_deadline(self) -> float:
        return self.heard + 3.0

    def apply(self, command: object, now: float) -> list[str]:
        return []

    def close(self) -> None: ...


@pytest.mark.parametrize(("patient", "silences"), [(True, 0), (False, 1)])
def test_a_judge_that_was_stopped_listens_before_it_judges(patient: bool, silences: int) -> None:
    """The process is stopped for a minute; what came meanwhile is delivered by a thread that runs a moment later."""
    machine, judge, waits = VirtualClock(), Judge(), [0]
    clock = LoopClock(machine)

    class Machine:
        def register(self, socket: object, flags: int) -> None: ...

        def poll(self, timeout: int) -> list[tuple[int, int]]:
            waits[0] += 1
            machine.advance(60.0 if waits[0] == 2 else timeout / 1000)
            return [(1, 1)] if waits[0] == 3 else []

    loop = EventLoop([judge], Machine, *((clock, clock.wait) if patient else (machine,)))
    said: list[str] = []
    for _ in range(4):
        loop.wait()
        for _, events in loop.events():
            said += events
    assert len(said) == silences, said
    assert clock.paused_s == (59.75 if patient else 0.0)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_the_kernel_says_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stdin=subprocess.PIPE) as child, ExitStack() as ends:
        ends.callback(child.kill)
        assert child.stdin is not None

        def activity() -> Activity:
            found = read_activity(child.pid)
            assert found is not None
            return found

        until(lambda: not activity().runnable, "it waits for its input")
        idle = activity()
        assert not idle.stopped
        child.stdin.write(b"\n")
        child.stdin.flush()
        until(lambda: activity().cpu_s > idle.cpu_s + 0.05, "a thread of it computes")
        until(lambda: activity().runnable, "it goes on computing")
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: activity().stopped and not activity().runnable, "it is stopped, with all its threads")
        stopped = activity()
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: not activity().stopped and activity().cpu_s > stopped.cpu_s, "it goes on")
        child.kill()
        until(lambda: read_activity(child.pid) is None, "it has ended, and was not waited for")
    assert read_activity(child.pid) is None
