"""Prefetches on a server with siblings: what they are asked for and what is fetched, before the scheduler grants it."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import AddPrefill, AnyFrontendRequest, KvHint, QueryPrefix, Submit
from headrace.core.messages.replies import AnySchedulerReply, KvHinted, PrefixReply, RequestFailed, Reserved
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.kv_tiers import TierTokens
from headrace.core.types.packed import unpack
from headrace.core.types.requests.kv_hints import HintResult
from headrace.core.types.requests.kv_return import PoolForecast
from headrace.core.types.requests.request import FetchFrom
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, Prefills, welcoming
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, running

PROMPT = list(range(100))
NOTHING = "the cache has no whole page of it"


class Sibling(Prefills):
    """Answers what it has cached."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self.more = {"prefixes": True}
        self.cached = answer
        self.asked: list[list[int]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/v1/prefixes":
            return await super().handle_async_request(request)
        self.asked.append(msgspec.json.decode(await request.aread())["prompt_token_ids"])
        return self.cached


class Link(FakeLink):
    """To a scheduler which has this of every prompt, and grants nothing."""

    def __init__(self, pool: PoolForecast, fails: bool = False) -> None:
        super().__init__(self._fetch)
        self.pool, self.fails = pool, fails

    def send(self, message: AnyFrontendRequest) -> None:
        if isinstance(message, QueryPrefix):
            self.say(PrefixReply(token=message.token, pool=self.pool))
        elif isinstance(message, KvHint):
            self.sent.append(message)
            self.say(KvHinted(token=message.token, results=(HintResult(reason=NOTHING),) * len(message.actions)))
        else:
            super().send(message)

    def _fetch(self, _link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        if self.fails:
            return [RequestFailed(rid=submit.rid, error=ErrorInfo(code="bad_metadata", message="bad", status=502))]
        return [Reserved(rid=submit.rid), finished(submit.rid, "fetched")]


def pool(cached: int = 0, host: int = 0, retainable: int = 960) -> PoolForecast:
    return PoolForecast(
        cached=cached,
        in_tiers=TierTokens(host=host),
        retainable=retainable,
        free=0,
        evictable=0,
        turn_chance=0.5,
        again_chance=0.5,
    )


def holding(tokens: int) -> httpx.Response:
    return httpx.Response(200, json={"cached_tokens": tokens})


async def hinted(link: Link, sibling: Sibling, tokenizer: Tokenizer, *actions: str) -> list[dict[str, Any]]:
    """What a server with a sibling answers."""
    given = [{"action_id": action, "action_type": action, "action_version": "1"} for action in actions]
    hints = {"protocol_version": "1", "message_id": "m", "actions": given}
    async with (
        running(link, tokenizer, role="prefill", siblings=(ONE,), prefill_transport=sibling, length=256) as service,
        client(service) as http,
    ):
        await link.wait_for(AddPrefill)
        welcoming(link, ONE)
        assert service.siblings is not None
        while not service.siblings.up():
            await asyncio.sleep(0)
        assert [one.knows_prefixes for one in service.siblings.up()] == [True]
        answer = await http.post("/v1/kv_hints", json={"prompt_token_ids": PROMPT, "kv_hints": hints})
        assert answer.status_code == 200, answer.text
        return list(json_of(answer)["kv_hints"])


@in_loop
async def test_what_the_tenant_may_retain_is_fetched_first_and_granted_then(tokenizer: Tokenizer) -> None:
    link, sibling = Link(pool(host=32, retainable=64)), Sibling(holding(96))
    await hinted(link, sibling, tokenizer, "prefetch", "release")
    assert sibling.asked == [PROMPT[:64]]
    submit, hint = (message for message in link.sent if isinstance(message, Submit | KvHint))
    assert unpack(submit.prompt).tolist() == PROMPT[:64]
    assert isinstance(submit.route, FetchFrom)
    assert (submit.route.prefix, submit.route.spare, hint.prompt != submit.prompt) == (True, True, True)
    assert [body["cached_only"] for _, body, _ in sibling.posts] == [True]


@in_loop
async def test_what_does_not_come_is_said_of_prefetches(tokenizer: Tokenizer) -> None:
    granted = await hinted(Link(pool(), fails=True), Sibling(holding(96)), tokenizer, "prefetch", "release")
    assert [each["reason"] for each in granted] == [f"{NOTHING}; a sibling has more of it, which did not come", NOTHING]


@pytest.mark.parametrize(
    ("known", "actions"),
    [
        pytest.param(pool(host=96), ["prefetch"], id="the tiers have it"),
        pytest.param(pool(retainable=0), ["prefetch"], id="no share"),
        pytest.param(pool(), ["retain", "release"], id="no prefetch"),
    ],
)
@in_loop
async def test_siblings_are_not_asked_in_vain(tokenizer: Tokenizer, known: PoolForecast, actions: list[str]) -> None:
    link, sibling = Link(known), Sibling(holding(96))
    await hinted(link, sibling, tokenizer, *actions)
    assert (sibling.asked, link.of(Submit)) == ([], [])


@pytest.mark.parametrize(
    "answer",
    [
        holding(16),
        holding(-96),
        httpx.Response(200, json={"cached_tokens": "all"}),
        httpx.Response(200, content=b"\x00{"),
        httpx.Response(500),
    ],
)
@in_loop
async def test_siblings_that_have_less_or_answer_otherwise(tokenizer: Tokenizer, answer: httpx.Response) -> None:
    link, sibling = Link(pool(cached=16)), Sibling(answer)
    (granted,) = await hinted(link, sibling, tokenizer, "prefetch")
    assert (len(sibling.asked), link.of(Submit), granted["reason"]) == (1, [], NOTHING)
