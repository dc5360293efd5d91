"""Background tasks of the front end that fail unexpectedly: they are logged, and go on."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.messages.frontend import AddPrefill, AnyFrontendRequest, QueryStats
from headrace.core.messages.kv_events import BlockRemoved
from headrace.core.runtime import background
from headrace.core.runtime.clock import SystemClock
from headrace.core.stats import Sample, Stats
from headrace.server.frontend.link import scheduler_client
from headrace.server.frontend.status import statistics_log
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.routing.replica_router import ReplicaRouter
from headrace.text.tokenizer import Tokenizer
from tests.server.event_server import EventServer
from tests.server.fake_prefills import ONE, TWO, Prefills, until_ready, welcoming
from tests.server.fakes import FakeLink, client, in_loop, running


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(scheduler_client, "PROBE_S", 0.01)
    monkeypatch.setattr(statistics_log, "PERIOD_S", 0.01)


class Failing(FakeLink):
    """A link that fails with the first so many messages of a kind."""

    def __init__(self, kind: type[AnyFrontendRequest], failures: int) -> None:
        super().__init__()
        self._kind = kind
        self.failures = failures

    def send(self, message: AnyFrontendRequest) -> None:
        if isinstance(message, self._kind) and self.failures:
            self.failures -= 1
            raise RuntimeError("an error that nobody foresaw")
        super().send(message)


def failing_once(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which raises the first time."""
    left = [1]

    def called(*args: Any, **named: Any) -> Any:
        if left:
            left.pop()
            raise RuntimeError("an error that nobody foresaw")
        return method(*args, **named)

    return called


@in_loop
async def test_a_prefill_server_is_found_all_the_same(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    link = Failing(AddPrefill, 2)
    async with (
        running(link, tokenizer, role="decode", prefill=(ONE,), prefill_transport=Prefills()) as service,
        client(service) as http,
    ):
        assert await link.wait_for(AddPrefill) == AddPrefill(name=ONE, endpoint="tcp://p1:5001")
        welcoming(link, ONE)
        await until_ready(http)
    assert caplog.text.count(f"the maintenance of prefill server {ONE} has failed, and begins again in") == 2
    assert "an error that nobody foresaw" in caplog.text


@in_loop
async def test_the_scheduler_is_watched_on(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    link = Failing(QueryStats, 1)
    async with running(link, tokenizer):
        await link.wait_for(QueryStats, 3)
    assert "the watch over the scheduler has failed, and begins again in" in caplog.text


@in_loop
async def test_statistics_are_logged_on(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates after a failure are those since the last line, not since the start of the server."""
    shown: list[float] = []
    monkeypatch.setattr(
        statistics_log,
        "summary",
        lambda before, after, _seconds: {"grown": after["prompt_tokens_total"] - before.get("prompt_tokens_total", 0)},
    )
    tokens = iter(range(1000, 100000, 7))

    async def snapshot(_self: StatsCollector) -> list[Stats]:
        number = next(tokens)
        if number == 1014:
            raise RuntimeError("an error that nobody foresaw")
        return [Stats((Sample("prompt_tokens_total", number),))]

    monkeypatch.setattr(StatsCollector, "snapshot", snapshot)
    with caplog.at_level(logging.INFO, statistics_log.__name__):
        async with running(FakeLink(), tokenizer):
            while len(shown) < 4:
                await asyncio.sleep(0.01)
                shown = [record.fields["grown"] for record in caplog.records if hasattr(record, "fields")]  # type: ignore[attr-defined]
    assert shown[:4] == [1000, 7, 14, 7]
    assert "the log of statistics has failed, and begins again in" in caplog.text


@in_loop
async def test_kv_events_are_followed_on(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error all that the server still has is asked for again."""
    learnt: list[int] = []
    monkeypatch.setattr(
        ReplicaRouter,
        "apply",
        failing_once(lambda _self, _number, events: learnt.extend(events[0].block_hashes)),
    )
    events, prefills, link = EventServer(), Prefills(), FakeLink()
    for number in (1, 2, 3):
        events.publish(BlockRemoved(block_hashes=(number,)))
    prefills.more = {
        "page_size": 16,
        "load": {"queued_seconds": 0.0, "seconds_per_squared_token": 0.0, "seconds_per_token": 0.001},
        "kv_events": {"port": events.source.port, "replay_port": events.source.replay_port},
    }
    local = "http://127.0.0.1:8001"
    prefills.control_ports["127.0.0.1"] = 5003
    serving = asyncio.create_task(events.loop())
    async with running(
        link, tokenizer, role="decode", prefill=(local, TWO), prefill_transport=prefills, clock=SystemClock()
    ):
        await link.wait_for(AddPrefill, 2)
        welcoming(link, local)
        while learnt != [1, 2, 3]:
            await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    events.close()
    assert "following the KV events of 127.0.0.1 has failed, and begins again in" in caplog.text
