"""--remote at the front end of a decode server: what is asked of the scheduler, what is posted, what is logged."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, PrefillDecided
from headrace.core.types.requests.remote_prefill import PrefillDecision, RemoteForecast
from headrace.core.types.requests.request import DecodeHere, FetchFrom
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, Prefills, decode, fetched
from tests.server.fakes import FakeLink, in_loop, json_of, reserving, saying
from tests.server.frontend.test_constraints import FirstRefused

Script = Callable[[FakeLink, Submit], Iterable[AnySchedulerReply]]
BODY = {"prompt": [1, 2, 3], "max_tokens": 5}
LOAD = {"queued_seconds": 2.0, "seconds_per_squared_token": 0.0, "seconds_per_token": 0.001, "trusted": True}


def decided(tokenizer: Tokenizer, decision: PrefillDecision) -> Script:
    """A scheduler that finds this of every prompt that is to be compared."""

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        yield PrefillDecided(rid=submit.rid, decision=decision)
        yield from reserving(link, submit) if decision.remote else ()
        yield from saying(tokenizer, "hello")(link, submit)

    return script


async def heard(prefills: Prefills) -> None:
    """The load of the server was asked for after its discovery, and taken in."""
    while prefills.discoveries < 3:
        await asyncio.sleep(0.01)


def route_of(link: FakeLink) -> FetchFrom:
    route = link.of(Submit)[-1].route
    assert isinstance(route, FetchFrom)
    return route


def check(forecast: RemoteForecast | None) -> None:
    """It is that of the load that was reported, less what the server has computed since."""
    assert forecast is not None
    assert 0.5 < forecast.queued_s <= LOAD["queued_seconds"]
    assert replace(forecast, queued_s=2.0) == RemoteForecast(2.0, 0.003)


@in_loop
async def test_always_compares_nothing(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        assert json_of(await http.post("/v1/completions", json=BODY))["choices"][0]["text"] == "hello"
        assert (route_of(link).compare, route_of(link).forecast) == (False, None)
        assert len(prefills.posts) == 1


@in_loop
async def test_never_computes_all_prompts_here_and_needs_no_prefill_server(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(saying(tokenizer, "hello")), Prefills()
    async with decode(link, tokenizer, prefills, up=False, remote="never") as (_, http):
        assert (await http.get("/ready")).status_code == 200
        assert json_of(await http.post("/v1/completions", json=BODY))["choices"][0]["text"] == "hello"
        assert link.of(Submit)[-1].route == DecodeHere()
        assert prefills.posts == []


@in_loop
async def test_what_the_prefill_server_is_expected_to_take_goes_to_the_scheduler(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(decided(tokenizer, PrefillDecision(True, "cheaper_there"))), Prefills()
    prefills.more = {"page_size": 16, "load": LOAD}
    async with decode(link, tokenizer, prefills, remote="cost") as (_, http):
        await heard(prefills)
        await http.post("/v1/completions", json=BODY)
        route = route_of(link)
        assert (route.prefill, route.compare) == (ONE, True)
        check(route.forecast)
        assert len(prefills.posts) == 1


@pytest.mark.parametrize("load", [None, {**LOAD, "trusted": False}], ids=["an earlier version", "no plan yet"])
@in_loop
async def test_a_server_without_a_cost_model_has_no_forecast(load: dict[str, Any] | None, tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(decided(tokenizer, PrefillDecision(True, "unknown_cost"))), Prefills()
    prefills.more = {"page_size": 16, "load": load}
    async with decode(link, tokenizer, prefills, remote="cost") as (_, http):
        await http.post("/v1/completions", json=BODY)
        assert (route_of(link).compare, route_of(link).forecast) == (True, None)


@in_loop
async def test_a_prompt_that_stays_is_not_posted_and_is_no_load(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    link, prefills = FakeLink(decided(tokenizer, PrefillDecision(False, "cached_here"))), Prefills()
    prefills.more = {"page_size": 1, "load": LOAD}
    with caplog.at_level(logging.INFO):
        async with decode(link, tokenizer, prefills, remote="cost") as (_, http):
            await heard(prefills)
            for _ in range(2):
                answer = json_of(await http.post("/v1/completions", json={**BODY, "logprobs": 1}))
                assert answer["choices"][0]["text"] == "hello"
                check(route_of(link).forecast)  # nothing of it is there, or cached there
            assert prefills.posts == []
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert len(lines) == 2
    assert all("prefill=cached_here" in line and "peer=" not in line for line in lines)


@in_loop
async def test_prompt_logprobs_and_constraints_of_a_prompt_that_stays_are_our_own(tokenizer: Tokenizer) -> None:
    """No answer of a prefill server is waited for, and its first token is not checked again."""
    link, prefills = FakeLink(decided(tokenizer, PrefillDecision(False, "cheaper_here"))), Prefills()
    prefills.more = {"structured_outputs": True, "hidden_states": True, "prompt_logprobs_start": True}
    async with decode(link, tokenizer, prefills, remote="cost") as (service, http):
        service.model._grammars = FirstRefused()
        answer = await http.post("/v1/completions", json={**BODY, "structured_outputs": {"choice": ["hello"]}})
        assert answer.status_code == 200, answer.text
        answer = await http.post("/v1/completions", json={**BODY, "prompt_logprobs": 1})
        assert answer.status_code == 200, answer.text
        assert prefills.posts == []


@pytest.mark.parametrize("remote", ["never", "cost"])
@in_loop
async def test_requests_that_name_their_prefill_server_are_fetched(remote: str, tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    named = {"bootstrap_host": "p1", "bootstrap_port": 8001, "bootstrap_room": 7}
    async with decode(link, tokenizer, prefills, remote=remote) as (_, http):
        answer: httpx.Response = await http.post("/v1/completions", json={**BODY, **named})
        assert answer.status_code == 200, answer.text
        assert (route_of(link).ticket, route_of(link).compare) == ("room:7", False)
        assert prefills.posts == []
