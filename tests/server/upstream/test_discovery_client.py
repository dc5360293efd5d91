"""What a decode server says about a --prefill that is no prefill server: in that server's own words."""

import httpx
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.server.app import create_app
from headrace.server.upstream.discovery_client import DiscoveryClient
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, in_loop, running


async def refusal(http: httpx.AsyncClient) -> str:
    async with http:
        with pytest.raises(HeadraceError) as caught:
            await DiscoveryClient(http, http).discover("http://x", key=True)
    return caught.value.info.message


@in_loop
async def test_a_server_in_another_role_says_so(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service:
        message = await refusal(httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service))))
    assert message == (
        "GET /v1/handoff answered 404: this server has role colocated; "
        "decode servers fetch from a server with --role prefill"
    )


@pytest.mark.parametrize("content", [b"", b"<html>", b'{"error": "no"}', b'{"detail": "Not Found"}'])
@in_loop
async def test_other_programs_have_their_status_alone(content: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, content=content))
    assert await refusal(httpx.AsyncClient(transport=transport)) == "GET /v1/handoff answered 404"


@in_loop
async def test_long_words_are_cut() -> None:
    answer = httpx.Response(503, json={"error": {"message": "x" * 9999}})
    assert len(await refusal(httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)))) < 400
