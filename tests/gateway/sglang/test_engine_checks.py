"""Decode engines that have registered are asked how they are set up, until one of those at the address answers."""

import asyncio
import logging

import pytest

from headrace.core.types.errors import ConfigError
from headrace.gateway.engine_http import EngineUnreachable
from headrace.gateway.sglang import engine_checks
from headrace.gateway.sglang.engine_checks import EngineChecks
from tests.server.fakes import in_loop


class Engines:
    """What each URL answers, one after the other; the last answer stays."""

    def __init__(self, **answers: list[Exception | None]) -> None:
        self.answers = answers
        self.asked: list[str] = []
        self.verified: dict[str, str] = {}
        self.checks = EngineChecks(self._probe, lambda agent, wrong: self.verified.update({agent: wrong}))

    def _probe(self, url: str) -> None:
        self.asked.append(url)
        answers = self.answers[url]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is not None:
            raise answer

    async def until(self, agents: int) -> dict[str, str]:
        async with asyncio.timeout(10):
            while len(self.verified) < agents:
                await asyncio.sleep(0.01)
        return self.verified


AWAY, UNFIT = EngineUnreachable("refused"), ConfigError("--page-size is 1")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "AGAIN_S", 0.01)


@in_loop
async def test_an_engine_that_answers_late_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    engines = Engines(a=[AWAY, AWAY, None])
    engines.checks.registered("one", ("a",))
    engines.checks.registered("two", ("a",))
    assert await engines.until(2) == {"one": "", "two": ""}
    assert engines.asked == ["a"] * 3, "once for both"
    assert len(caplog.records) == 1, "one line in ten seconds"
    engines.checks.registered("three", ("a",))
    assert (await engines.until(3))["three"] == ""
    assert len(engines.asked) == 4, "a later one is asked anew"


@in_loop
async def test_of_two_engines_at_an_address_one_may_be_away_and_none_unfit() -> None:
    engines = Engines(a=[AWAY], b=[None], c=[UNFIT])
    engines.checks.registered("one", ("a", "b"))
    engines.checks.registered("two", ("b", "c"))
    engines.checks.registered("three", ("a", "c"))
    assert await engines.until(3) == {"one": "", "two": str(UNFIT), "three": str(UNFIT)}


@in_loop
async def test_engines_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engines = Engines(a=[AWAY], b=[None], c=[UNFIT])
    await engines.checks.at_start(("a", "b"))
    assert "asked when it registers" in caplog.text
    with pytest.raises(ConfigError, match="--page-size is 1"):
        await engines.checks.at_start(("b", "c"))


@in_loop
async def test_checks_end_with_the_gateway() -> None:
    engines = Engines(a=[AWAY])
    engines.checks.registered("one", ("a",))
    await asyncio.sleep(0.05)
    await engines.checks.stop()
    asked = len(engines.asked)
    await asyncio.sleep(0.05)
    assert (len(engines.asked), engines.verified) == (asked, {})
