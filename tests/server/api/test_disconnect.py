"""A client that disconnects cancels its requests, in every phase. Over a real HTTP server."""

import asyncio
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.replies import Tokens
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, in_loop, listening, running

REQUESTS: list[tuple[str, str, dict[str, Any], int]] = [
    ("/v1/completions", "colocated", {"prompt": "x"}, 1),
    ("/v1/completions", "colocated", {"prompt": "x", "n": 3}, 3),
    ("/v1/completions", "colocated", {"prompt": "x", "stream": True}, 1),
    ("/v1/chat/completions", "colocated", {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}, 2),
    ("/v1/score", "colocated", {"query": [1], "items": [[2], [3]], "label_token_ids": [4]}, 2),
    ("/v1/prefill", "prefill", {"prompt": "x", "ticket": "t"}, 1),
    ("/v1/prefill", "prefill", {"prompt": "x", "ticket": "t", "stream": True}, 1),
]


@pytest.mark.parametrize(("path", "role", "body", "requests"), REQUESTS)
@in_loop
async def test_before_the_first_token(
    path: str, role: str, body: dict[str, Any], requests: int, tokenizer: Tokenizer
) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role=role) as service, listening(service) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post(path, json=body))
            await link.wait_for(Submit, requests)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await link.wait_for(Abort, requests)
        assert {abort.rid for abort in link.of(Abort)} == {submit.rid for submit in link.of(Submit)}
        assert all(abort.error.status == 499 for abort in link.of(Abort))


@in_loop
async def test_between_two_tokens_of_a_stream(tokenizer: Tokenizer) -> None:
    def script(_link: FakeLink, submit: Submit) -> list[Tokens]:
        return [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello")))]

    link = FakeLink(script)
    async with (
        running(link, tokenizer) as service,
        listening(service) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        body = {"prompt": "x", "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            first = await anext(response.aiter_lines())
            assert "hello" in first
            assert link.of(Abort) == []
        await link.wait_for(Abort)
        assert service.completions.open_requests == 0
