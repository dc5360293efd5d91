"""The line of statistics in the log: what it says of a period, and that there is none while nothing happens."""

import asyncio
import logging

import pytest

from headrace.core.runtime.clock import SystemClock
from headrace.core.stats import Sample, Stats
from headrace.server.frontend.status import statistics_log
from headrace.server.frontend.status.statistics_log import StatisticsLog, summary, values
from tests.server.fakes import in_loop

KV = (Sample("kv_pages", 50, ("free",)), Sample("kv_pages", 30, ("cached",)), Sample("kv_pages", 20, ("leased",)))


def stats(prompt: int, cached: int, generated: int, *more: Sample) -> list[Stats]:
    counters = (("prompt_tokens_total", prompt), ("cached_tokens_total", cached), ("generated_tokens_total", generated))
    return [Stats(tuple(Sample(name, value) for name, value in counters)), Stats((*KV, *more))]


def test_rates_ends_phases_and_pages() -> None:
    before = values(stats(100, 10, 5, Sample("requests_total", 3, ("finished", "stop"))))
    after = values(
        stats(
            1100, 260, 25,
            Sample("requests_total", 5, ("finished", "stop")), Sample("requests_total", 2, ("finished", "length")),
            Sample("requests_total", 1, ("failed", "cancelled")), Sample("bytes_sent_total", 30 << 20, ("zmq",)),
            Sample("bytes_sent_total", 10 << 20, ("shm",)), Sample("queue_requests", 4, ("waiting",)),
            Sample("queue_requests", 0, ("running",)),
        )
    )  # fmt: skip
    assert summary(before, after, 10.0) == {
        "seconds": 10.0, "prompt_tokens_per_s": 100.0, "cached": 0.25, "generated_tokens_per_s": 2.0, "finished": 4,
        "failed": 1, "waiting": 4, "kv_leased": 0.2, "kv_cached": 0.3, "sent_mib_per_s": 4.0, "received_mib_per_s": 0.0,
    }  # fmt: skip


def test_nothing_is_said_of_a_period_without_work() -> None:
    same = values(stats(100, 10, 5))
    assert summary(same, same, 10.0) == {}
    assert summary(same, same | {"open_requests": 1.0}, 10.0)["finished"] == 0, "a request that waits is work"


def test_a_scheduler_that_started_again_counts_from_0() -> None:
    fields = summary(values(stats(1000, 0, 50)), values(stats(100, 0, 60)), 10.0)
    assert (fields["prompt_tokens_per_s"], fields["generated_tokens_per_s"]) == (0.0, 1.0)


@in_loop
async def test_one_line_for_each_period_with_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(statistics_log, "PERIOD_S", 0.0)
    snapshots = [stats(10, 0, 1), stats(10, 0, 1), stats(20, 0, 2)]
    over = asyncio.Event()

    async def snapshot() -> list[Stats]:
        if not snapshots:
            over.set()
            await asyncio.Event().wait()
        return snapshots.pop(0)

    with caplog.at_level(logging.INFO, statistics_log.__name__):
        task = asyncio.create_task(StatisticsLog(snapshot, SystemClock()).run())
        await over.wait()
        task.cancel()
    assert [record.getMessage().split()[0] for record in caplog.records] == ["statistics"] * 2
