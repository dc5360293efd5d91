"""The supervisor with real child processes that exit."""

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.core.messages.replies import StageDown
from headrace.core.runtime.process import CONFIGURATION_MISTAKE, GROUP_ENDED_STATUS, MISTAKE
from headrace.core.types.ranks.external import ExternalMember
from headrace.core.types.ranks.layout import Layout
from headrace.server.launch import supervisor as module
from headrace.server.launch.child_process import END_TIMEOUT_S, SPINS, Child, StartFailed
from headrace.server.launch.supervisor import MAX_RESTARTS, Supervisor
from tests.scarcity import no_descriptors
from tests.server.launch.child import Script

NAME = "tests.server.launch.child"
ROOT = Path(__file__).resolve().parents[3]  # children run with python -P


def child(status: int | None = None) -> Child:
    return Child(NAME, Script(status), threads=1, environment={"PYTHONPATH": str(ROOT)})


class Site:
    """A supervisor of stages that exit with the statuses of plan(epoch) (None: never), and what it reported."""

    def __init__(
        self,
        plan: Callable[[int], list[int | None]],
        *,
        scheduler: Child | None = None,
        served: bool = False,
        start_timeout_s: float = 60.0,
    ) -> None:
        self.starts: list[int] = []
        self.lost: list[tuple[int, str]] = []
        self._plan = plan
        self._served = served
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(scheduler or child(), self._make, start_timeout_s, Layout(pp=3))

    def _make(self, epoch: int) -> list[Child]:
        self.starts.append(epoch)
        return [child(status) for status in self._plan(epoch)]

    async def _on_lost(self, stage: int, message: str) -> None:
        """As the scheduler: reports whether the group had completed a plan."""
        self.lost.append((stage, message))
        down = StageDown(stage=stage, message=message, epoch=self.starts[-1], served=self._served)
        self.supervisor.stage_down(down)

    async def start(self) -> None:
        await self.supervisor.start()
        self.supervisor.watch(self._on_lost)

    async def started(self, starts: int) -> None:
        while len(self.starts) < starts:
            await asyncio.sleep(0.01)


def timed(test: Callable[[pytest.MonkeyPatch], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    @wraps(test)
    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
        asyncio.run(asyncio.wait_for(test(monkeypatch), 60))

    return run


@timed
async def test_restarts_of_a_group_that_never_serves_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(lambda epoch: [None, 7])
    await site.start()
    assert await site.supervisor.fatal == 1
    assert site.starts == list(range(MAX_RESTARTS + 1))
    assert site.lost[0] == (1, "stage 1 exited with status 7")
    await site.supervisor.end()


@timed
async def test_a_group_that_has_served_is_restarted_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    often = 2 * MAX_RESTARTS
    site = Site(lambda epoch: [9 if epoch < often else None], served=True)
    await site.start()
    await site.started(often + 1)
    assert not site.supervisor.fatal.done()
    site.supervisor.fatal.set_result(0)  # ends the scheduler at once
    await site.supervisor.end()


@timed
async def test_starts_that_another_server_ends_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be restarted as often as its operator likes, while this one is idle."""
    often = 2 * MAX_RESTARTS
    site = Site(lambda epoch: [GROUP_ENDED_STATUS if epoch < often else None], start_timeout_s=0.05)
    site.supervisor = Supervisor(child(), site._make, 0.05, Layout(), ExternalMember(1, 2, "10.0.0.5", 9000))
    await site.start()
    await site.started(often + 2)  # the constructor of Site has made one, too
    await asyncio.sleep(0.2)
    assert len(site.starts) == often + 2, "there is no limit to the time in which others come"
    assert not site.supervisor.fatal.done()
    assert site.lost[0] == (
        0,
        "server 0 of --dp-external 1/2@10.0.0.5:9000, with which this one shares experts, has ended, has lost a rank "
        "or cannot be reached",
    )
    site.supervisor.fatal.set_result(0)
    await site.supervisor.end()


@timed
async def test_a_configuration_mistake_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(lambda epoch: [None, CONFIGURATION_MISTAKE])
    await site.start()
    assert await site.supervisor.fatal == MISTAKE
    assert site.starts == [0]
    await site.supervisor.end()


@timed
async def test_no_exit_status_that_a_library_ends_a_process_with_has_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneMKL ends it with 2, which is what the command itself says of a mistake; others with 1, 3, 127 or 255."""
    statuses: list[int | None] = [2, 3, 127, 255, GROUP_ENDED_STATUS]  # the last: no other server is there to end
    site = Site(lambda epoch: [statuses[epoch % len(statuses)]])
    await site.start()
    assert await site.supervisor.fatal == 1, "starts are limited, and the server can be started again"
    assert len(site.starts) == MAX_RESTARTS + 1
    await site.supervisor.end()


@timed
async def test_a_scheduler_that_a_library_ends_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for status, expected in ((2, 1), (CONFIGURATION_MISTAKE, MISTAKE)):
        site = Site(lambda epoch: [None], scheduler=child(status))
        await site.start()
        assert await site.supervisor.fatal == expected
        await site.supervisor.end()


@timed
async def test_a_group_that_is_not_ready_in_time_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGE_DOWN_TIMEOUT_S", 0.01)
    site = Site(lambda epoch: [None, None], start_timeout_s=0.2)
    await site.start()
    await site.started(2)
    site.supervisor.stages_ready()
    await asyncio.sleep(0.5)
    assert site.starts == [0, 1], "a group that is ready in time is left alone"
    site.supervisor.stage_down(StageDown(stage=1, message="silent", epoch=0))
    await asyncio.sleep(0.2)
    assert site.starts == [0, 1], "a report about an earlier group is ignored"
    site.supervisor.stage_down(StageDown(stage=1, message="silent", epoch=1))
    await site.started(3)
    site.supervisor.fatal.set_result(0)
    await site.supervisor.end()


@timed
async def test_an_exit_of_the_scheduler_ends_the_server_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(lambda epoch: [None, None], scheduler=child(3))
    await site.start()
    assert await site.supervisor.fatal == 1
    started = time.monotonic()
    await site.supervisor.end()
    assert time.monotonic() - started < END_TIMEOUT_S, "stages that were not told to exit are killed at once"


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def children() -> list[psutil.Process]:
    """Those of this module: other tests of the process may have left theirs, such as multiprocessing's tracker."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if NAME in each.cmdline():
                found.append(each)
    return found


def test_stages_that_cannot_be_started_now_are_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    often = 2 * MAX_RESTARTS

    async def main() -> None:
        site = Site(lambda epoch: [None, None], served=True)
        await site.start()
        with no_descriptors():
            site.supervisor.stage_down(StageDown(stage=0, message="silent", epoch=0, served=True))
            await until(lambda: len(site.lost) >= often)
        assert {stage for stage, _ in site.lost} == {0}
        assert all("cannot be started: [Errno 24] Too many open files; trying" in message for _, message in site.lost)
        await until(lambda: len(children()) == 3)
        assert not site.supervisor.fatal.done()
        assert site.starts == list(range(len(site.lost) + 2)), "each start has an epoch of its own"
        site.supervisor.fatal.set_result(0)
        await site.supervisor.end()

    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)
    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(main(), 60))
    assert len([record for record in caplog.records if "cannot be started" in record.getMessage()]) == 1, "said once"


@timed
async def test_stages_that_find_no_free_port_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look for one takes a descriptor, before a process is started."""
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)

    def plan(epoch: int) -> list[int | None]:
        if 0 < epoch <= 2 * MAX_RESTARTS:
            raise OSError(errno.EMFILE, "Too many open files")
        return [None] if epoch else [7]

    site = Site(plan, served=True)
    await site.start()
    await until(lambda: len(children()) == 2 and site.starts[-1] == 2 * MAX_RESTARTS + 1)
    assert not site.supervisor.fatal.done()
    assert len([why for _, why in site.lost if "cannot be started: [Errno 24]" in why]) == 2 * MAX_RESTARTS
    site.supervisor.fatal.set_result(0)
    await site.supervisor.end()


@timed
async def test_a_watch_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(epoch: int) -> list[int | None]:
        if epoch:
            raise ZeroDivisionError
        return [7]

    site = Site(plan)
    await site.start()
    assert await site.supervisor.fatal == 1
    await site.supervisor.end()


@timed
async def test_what_was_started_does_not_stay_behind_a_start_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = Child(NAME, Script(), threads=1, environment={"LONG": "x" * (4 << 20)})  # more than a system takes
    supervisor = Supervisor(child(), lambda epoch: [child(), unfit], 60.0, Layout(pp=2))
    with pytest.raises(StartFailed, match="too long"):
        await supervisor.start()
    assert children() == []


@timed
async def test_a_child_that_ends_before_it_has_read_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Child("json", Script(1, "x" * (8 << 20)), threads=1)  # "python -m json" reads nothing
    await gone.start()
    assert await gone.wait() != 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_that_wait_sleep_soon_unless_told_otherwise(
    given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        made = child()
        await made.start()
        await until(lambda: len(children()) == 1)  # a process that has just begun has no command line yet
        (process,) = children()
        assert process.environ().get("GOMP_SPINCOUNT") == expected
        await made.kill()

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    asyncio.run(main())
