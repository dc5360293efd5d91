"""The choice of a prefill server by score: prefixes that were sent or announced, reported queues, failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import AddPrefill, Submit
from headrace.core.messages.kv_events import AllBlocksCleared, BlockStored
from headrace.core.messages.replies import AnySchedulerReply
from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.packed import pack
from headrace.peer.kv_event_follower import KvEventSource
from headrace.server.routing.replica_router import page_names
from headrace.text.tokenizer import Tokenizer
from tests.server.event_server import EventServer
from tests.server.fake_prefills import ONE, TWO, Prefills, fetched, until_ready, welcoming
from tests.server.fakes import FakeLink, client, in_loop, running
from tests.server.frontend.test_prefill_servers import prefill_of

PAGE = 4
COST = {"seconds_per_squared_token": 0.0, "seconds_per_token": 0.001}


class Reporting(Prefills):
    """Prefill servers with small pages that report the load in queues, by host."""

    def __init__(self, **queues: float) -> None:
        super().__init__()
        self.queues = queues
        self.events: dict[str, KvEventSource] = {}
        self.asked: dict[str, int] = {}
        self.more = {"page_size": PAGE}
        self.changed = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/v1/handoff" and host in self.queues:
            self.asked[host] = self.asked.get(host, 0) + 1
            self.changed.set()
            load = {"queued_seconds": self.queues[host], **COST}
            self.more = {"page_size": PAGE, "load": load, "kv_events": msgspec.to_builtins(self.events.get(host))}
        return await super().handle_async_request(request)

    async def reported(self) -> None:
        """Each server has answered again: what it said before is known."""
        before = dict(self.asked)
        while any(self.asked[host] < before[host] + 2 for host in self.queues):
            self.changed.clear()
            await self.changed.wait()


@asynccontextmanager
async def two_servers(
    tokenizer: Tokenizer, prefills: Prefills, **server: Any
) -> AsyncIterator[tuple[FakeLink, httpx.AsyncClient]]:
    link = FakeLink(fetched(tokenizer))
    async with (
        running(
            link, tokenizer, **{"role": "decode", "prefill": (ONE, TWO), "prefill_transport": prefills, **server}
        ) as service,
        client(service) as http,
    ):
        await link.wait_for(AddPrefill, 2)
        welcoming(link, *(server.url for server in service.prefills.servers()))
        await until_ready(http)
        yield link, http


async def chosen(link: FakeLink, http: httpx.AsyncClient, prompt: list[int], **more: Any) -> str:
    """The server that a prompt goes to; it is answered."""
    await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **more})
    return prefill_of(link.of(Submit)[-1])


@in_loop
async def test_the_next_turn_goes_where_the_last_one_went(tokenizer: Tokenizer) -> None:
    """Servers of an earlier version report nothing: what was sent to them is known."""
    async with two_servers(tokenizer, Reporting()) as (link, http):
        homes = {text: await chosen(link, http, [text] * 30) for text in range(16)}
        assert set(homes.values()) == {ONE, TWO}
        for _ in range(3):
            assert {text: await chosen(link, http, [text] * 40) for text in homes} == homes
        assert {await chosen(link, http, [1] * 30, cache_salt=f"{salt}") for salt in range(16)} == {ONE, TWO}


@in_loop
async def test_least_load_stays_to_be_had(tokenizer: Tokenizer) -> None:
    async with two_servers(tokenizer, Reporting(), routing="least-load") as (link, http):
        assert {await chosen(link, http, [text] * 30) for text in range(16)} == {ONE}, "nothing waits anywhere"


@in_loop
async def test_a_prompt_leaves_its_holder_when_the_queue_there_is_long(tokenizer: Tokenizer) -> None:
    """28 cached tokens weigh 0.224 s."""
    prefills = Reporting(p1=0.0, p2=9.0)
    async with two_servers(tokenizer, prefills) as (link, http):
        await prefills.reported()
        assert {await chosen(link, http, [text] * 30) for text in range(8)} == {ONE}
        prefills.queues = {"p1": 0.2, "p2": 0.0}
        await prefills.reported()
        assert await chosen(link, http, [3] * 30) == ONE
        prefills.queues = {"p1": 0.25, "p2": 0.0}
        await prefills.reported()
        assert await chosen(link, http, [3] * 30) == TWO


@in_loop
async def test_prompts_that_are_not_answered_count_before_any_report_does(tokenizer: Tokenizer) -> None:
    prefills = Reporting(p1=0.0, p2=0.0)
    async with two_servers(tokenizer, prefills) as (link, http):
        await prefills.reported()
        prefills.hold.clear()
        link.script = lambda _link, _submit: ()
        asked = []
        for number in range(1, 9):
            body = {"prompt": [number] * 30, "max_tokens": 2}
            asked.append(asyncio.create_task(http.post("/v1/completions", json=body)))
            await link.wait_for(Submit, number)
        sent = [prefill_of(submit) for submit in link.of(Submit)]
        assert (sent.count(ONE), sent.count(TWO)) == (4, 4)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


class OneFails(Reporting):
    """The first server refuses every prompt."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "p1" and request.url.path == "/v1/prefill":
            return httpx.Response(503, json={"error": {"message": "no", "code": "no"}})
        return await super().handle_async_request(request)


@in_loop
async def test_a_server_that_fails_a_prompt_gets_none_for_a_while(tokenizer: Tokenizer) -> None:
    """It would otherwise look idle, and draw all prompts."""

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        return fetched(tokenizer)(link, submit)[: 1 if prefill_of(submit) == ONE else None]

    async with two_servers(tokenizer, OneFails(), clock=VirtualClock()) as (link, http):
        link.script = script
        text = 0
        while ONE not in {prefill_of(submit) for submit in link.of(Submit)}:
            text += 1
            assert await chosen(link, http, [text] * 30) == TWO, "it moves there at once"
        for other in range(16):
            before = len(link.of(Submit))
            assert await chosen(link, http, [100 + other] * 30) == TWO
            assert len(link.of(Submit)) == before + 1, "the first one is not even asked"


@pytest.mark.parametrize(
    "odd",
    [{"load": {"queued_seconds": -1}}, {"load": 3}, {"page_size": 0}, {"kv_events": {"port": 0}}],
)
def test_a_server_that_reports_nonsense_is_used_all_the_same(tokenizer: Tokenizer, odd: dict[str, Any]) -> None:
    @in_loop
    async def run() -> None:
        prefills = Prefills()
        prefills.more = odd
        async with two_servers(tokenizer, prefills) as (link, http):
            assert {await chosen(link, http, [text] * 30) for text in range(16)} == {ONE, TWO}

    run()


@in_loop
async def test_holders_are_known_from_kv_events_until_the_cache_is_cleared(tokenizer: Tokenizer) -> None:
    """The server with events has 50 ms queued; prompts of which it has 28 tokens, in its host tier, go there."""
    prefills = Reporting(**{"127.0.0.1": 0.05, "p2": 0.0})
    prefills.control_ports = {"127.0.0.1": 5001, "p2": 5002}
    here = "http://127.0.0.1:8001"
    async with serving_events() as server:
        prefills.events = {"127.0.0.1": server.source}
        async with two_servers(tokenizer, prefills, prefill=(here, TWO)) as (link, http):
            await prefills.reported()
            assert await chosen(link, http, [8] * 30) == TWO, "the shorter queue"
            for number in count():  # until events come, prompts go to the shorter queue, and are remembered there
                prompt = [number % 100, number // 100] * 15
                server.publish(stored(prompt))
                await asyncio.sleep(0.01)
                if await chosen(link, http, prompt) == here:
                    break
            assert await chosen(link, http, prompt, cache_salt="other") == TWO
            assert await chosen(link, http, prompt) == here
            while await chosen(link, http, prompt) == here:
                server.publish(AllBlocksCleared())
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving_events() -> AsyncIterator[EventServer]:
    server = EventServer()
    loop = asyncio.create_task(server.loop())
    try:
        yield server
    finally:
        loop.cancel()
        server.close()


def stored(prompt: list[int]) -> BlockStored:
    """The event that says that the host tier has this prompt."""
    names = tuple(page_names(pack(prompt), "", PAGE))
    return BlockStored(block_hashes=names, parent_block_hash=None, token_ids=(), block_size=PAGE, medium="CPU")
