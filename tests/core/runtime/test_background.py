"""Background tasks that fail: they are logged, and begin again."""

import asyncio
import logging

import pytest

from headrace.core.runtime import background
from headrace.core.runtime.background import STEADY_S, keep_running
from headrace.core.runtime.clock import VirtualClock

pytestmark = pytest.mark.usefixtures("pauses")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, which take no time."""
    made: list[float] = []

    class Asyncio:
        @staticmethod
        async def sleep(seconds: float) -> None:
            made.append(seconds)
            await asyncio.sleep(0)

    monkeypatch.setattr(background, "asyncio", Asyncio)
    return made


class Work:
    """Fails so many times, then waits to be cancelled."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.steady = asyncio.Event()

    async def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise KeyError(f"failure {self.left}")
        self.steady.set()
        await asyncio.Event().wait()


def test_it_is_logged_and_begins_again_with_longer_pauses(
    pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        work = Work(9)
        task = asyncio.create_task(keep_running("the watch", work))
        await asyncio.wait_for(work.steady.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 9
    assert caplog.records[1].getMessage() == "the watch has failed, and begins again in 1 s"
    assert "KeyError: 'failure 7'" in caplog.text, "with the traceback"


def test_after_a_long_time_the_pauses_are_short_again(pauses: list[float]) -> None:
    clock = VirtualClock()
    ran_s = iter([1, 1, STEADY_S + 1, 1, 1])

    async def work() -> None:
        if (seconds := next(ran_s, None)) is None:
            return
        clock.advance(seconds)
        raise OSError(24, "Too many open files")

    asyncio.run(keep_running("the watch", work, clock))

    assert pauses == [0.5, 1.0, 0.5, 1.0, 2.0]


def test_work_that_ends_is_over(pauses: list[float]) -> None:
    ran = []

    async def work() -> None:
        ran.append(1)

    asyncio.run(keep_running("the watch", work))
    assert (ran, pauses) == ([1], [])
