"""A tenant with all the requests that may be open at a time keeps no other out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest

from headrace.core.messages.frontend import Submit
from headrace.server import app
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, running

MOST = 4  # requests with a key that may be open
KEYS = ("greedy=g", "modest=m")


@asynccontextmanager
async def two_tenants(tokenizer: Tokenizer) -> AsyncIterator[tuple[FakeLink, httpx.AsyncClient]]:
    link = FakeLink()  # its requests stay open
    async with running(link, tokenizer, tenant_keys=KEYS) as service, client(service) as http:
        yield link, http


def ask(http: httpx.AsyncClient, key: str) -> "asyncio.Task[httpx.Response]":
    headers = {"Authorization": f"Bearer {key}"}
    return asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}, headers=headers))


@in_loop
async def test_a_tenant_with_all_open_requests_leaves_some_for_another(tokenizer: Tokenizer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "max_http_connections", lambda: 2 * MOST)
        async with two_tenants(tokenizer) as (link, http), AsyncExitStack() as left:
            open_ones = [ask(http, "g") for _ in range(MOST)]
            left.callback(lambda: [each.cancel() for each in open_ones])
            await link.wait_for(Submit, MOST)
            refused = await ask(http, "g")
            assert (refused.status_code, json_of(refused)["error"]["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
            open_ones += [ask(http, "m") for _ in range(MOST // 2)]
            await link.wait_for(Submit, MOST + MOST // 2)
            assert (await ask(http, "m")).status_code == 429, "it has its share"
            for submit in link.of(Submit):
                link.say(finished(submit.rid))
            assert {each.status_code for each in await asyncio.gather(*open_ones)} == {200}
            again = ask(http, "g")
            link.say(finished((await link.wait_for(Submit, MOST + MOST // 2 + 1)).rid))
            assert (await again).status_code == 200
