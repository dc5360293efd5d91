"""Moved prompts that take along what has come of their KV, and prompts of which a second prefill server has a turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, AnyFrontendRequest, QueryPrefix, Submit
from headrace.core.messages.replies import AnySchedulerReply, PrefillState, PrefixReply, RequestFailed, Reserved
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.kv_return import PoolForecast
from headrace.core.types.requests.request import FetchFrom, SendTo
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, running, saying
from tests.server.frontend.test_failover import Several, three

PROMPT = list(range(10))
RESUME = {"ticket": "k", "control_port": 6000, "tokens": 8}
HOST = "127.0.0.1"  # of the client of the tests


def moving(link: FakeLink, tokenizer: Tokenizer, cached: int = 8) -> None:
    """The second attempt finds so many tokens here."""

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        if isinstance(submit.route, SendTo):
            return []
        reserved = Reserved(rid=submit.rid, cached=cached if submit.moved else 0)
        return [reserved, *(saying(tokenizer, "hello")(link, submit) if submit.moved else ())]

    link.script = script


async def sent_by(tokenizer: Tokenizer, *, knows: bool = True, **body: Any) -> tuple[list[Any], FakeLink]:
    """What is posted to two prefill servers, the first of which fails."""
    prefills = Several(p1=httpx.ReadError("reset"))
    prefills.more = {"resume": knows, "page_size": 4}
    async with three(tokenizer, prefills, kv_return=True) as (link, http, _):
        moving(link, tokenizer)
        answer = await http.post("/v1/completions", json={"prompt": PROMPT, **body})
        assert answer.status_code == 200, answer.text
        await asyncio.sleep(0)
    return [body.get("resume") for _, body, _ in prefills.posts], link


@in_loop
async def test_what_has_come_is_offered_to_the_next_server_alone(tokenizer: Tokenizer) -> None:
    (first, second), link = await sent_by(tokenizer)
    assert first is None
    assert (second["control_port"], second["tokens"]) == (5555, 8)
    (offer,) = (submit for submit in link.of(Submit) if isinstance(submit.route, SendTo))
    assert offer.route == SendTo(second["ticket"], cached=True)
    assert unpack(offer.prompt).tolist() == PROMPT[:8]
    assert [abort.rid for abort in link.of(Abort)][-1] == offer.rid, "it ends with the prompt"


@pytest.mark.parametrize("case", [{"knows": False}, {"prompt_logprobs": 1}])
@in_loop
async def test_nothing_is_offered_to_servers_that_do_not_know_it_and_for_prompts_that_are_computed_whole(
    tokenizer: Tokenizer, case: dict[str, Any]
) -> None:
    sent, link = await sent_by(tokenizer, **case)
    assert sent == [None, None]
    assert not any(isinstance(submit.route, SendTo) for submit in link.of(Submit))


class Holder(FakeLink):
    """To the scheduler of a prefill server, which has this of every prompt, and fetches what it is told to fetch."""

    def __init__(self, tokenizer: Tokenizer, cached: int = 0, *, has_peer: bool = True, fails: bool = False) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._cached, self._has_peer, self._fails = cached, has_peer, fails
        self.script = self._answer

    def send(self, message: AnyFrontendRequest) -> None:
        if isinstance(message, QueryPrefix):
            self.sent.append(message)
            pool = PoolForecast(cached=self._cached, free=99, evictable=0, turn_chance=0.5, again_chance=0.5)
            self.say(PrefixReply(token=message.token, pool=pool, cost=(0.0, 0.1), has_peer=self._has_peer))
            return
        super().send(message)
        if isinstance(message, AddPrefill):
            self.say(PrefillState(name=message.name, up=True))

    def _answer(self, link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        if not isinstance(submit.route, FetchFrom):
            return list(saying(self._tokenizer, "h", "handoff")(link, submit))
        if self._fails:
            return [RequestFailed(rid=submit.rid, error=ErrorInfo(code="not_cached", message="gone", status=412))]
        return [finished(submit.rid, "fetched")]


@asynccontextmanager
async def taking(link: FakeLink, tokenizer: Tokenizer, *hosts: str) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    async with running(link, tokenizer, role="prefill", accept_returns=hosts, length=256) as service:
        service.fetches = None
        async with client(service) as http:
            yield service, http


async def fetched_by(link: FakeLink, tokenizer: Tokenizer, *hosts: str, **resume: Any) -> list[Submit]:
    """What a prefill server fetches for a prompt."""
    async with taking(link, tokenizer, *hosts) as (service, http):
        size = service.config.engine.page_size
        body = {
            "prompt_token_ids": list(range(2 * size)),
            "ticket": "t",
            "resume": {**RESUME, "tokens": size, **resume},
        }
        answer = await http.post("/v1/prefill", json=body)
        assert answer.status_code == 200, answer.text
        assert json_of(answer)["ticket"] == "t"
        assert json_of(await http.get("/v1/handoff"))["resume"] == bool(hosts)
    return [submit for submit in link.of(Submit) if isinstance(submit.route, FetchFrom)]


@in_loop
async def test_what_is_offered_is_fetched_from_the_host_that_the_prompt_comes_from(tokenizer: Tokenizer) -> None:
    link = Holder(tokenizer)
    (submit,) = await fetched_by(link, tokenizer, HOST)
    assert submit.route == FetchFrom(f"tcp://{HOST}:6000", "k", "external", prefix=True)
    assert link.of(Submit)[-1].route.ticket == "t", "the prompt comes after it"
    assert link.of(AddPrefill)[0].endpoint == f"tcp://{HOST}:6000"


@pytest.mark.parametrize(
    ("link", "hosts", "resume"),
    [
        ({}, (), {}),  # no host is allowed
        ({}, ("10.0.0.1",), {}),  # another one is
        ({"has_peer": False}, (HOST,), {}),  # it has no session with us
        ({"cached": 64}, (HOST,), {}),  # it is cached here
        ({}, (HOST,), {"tokens": 3}),  # no whole pages
        ({}, (HOST,), {"tokens": 100_000}),  # more than the prompt has
    ],
)
@in_loop
async def test_offers_that_are_passed_over_cost_no_prompt(
    tokenizer: Tokenizer, link: dict[str, Any], hosts: tuple[str, ...], resume: dict[str, Any]
) -> None:
    assert await fetched_by(Holder(tokenizer, **link), tokenizer, *hosts, **resume) == []


@in_loop
async def test_an_offer_that_fails_costs_no_prompt(tokenizer: Tokenizer) -> None:
    assert len(await fetched_by(Holder(tokenizer, fails=True), tokenizer, HOST)) == 1


@in_loop
async def test_bad_offers_are_refused_by_name(tokenizer: Tokenizer) -> None:
    async with taking(Holder(tokenizer), tokenizer, HOST) as (_, http):
        for wrong in ({"control_port": 0}, {"tokens": 0}, {"ticket": ""}, {"more": 1}):
            body = {"prompt_token_ids": PROMPT, "ticket": "t", "resume": {**RESUME, **wrong}}
            answer = await http.post("/v1/prefill", json=body)
            assert answer.status_code == 400, wrong
            assert next(iter(wrong)) in json_of(answer)["error"]["message"], wrong
