"""What a request has held is let go of at its end, however it ends, without the garbage collector: full collections
hold up a server with thousands of open requests for a third of a second, and are seldom."""

import asyncio
import gc
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, RequestFailed, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.server.http.exchange import Exchange
from headrace.text.tokenizer import Tokenizer
from tests.garbage import Garbage
from tests.server.api.test_disconnect import REQUESTS
from tests.server.fake_prefills import fetched, welcoming
from tests.server.fakes import FakeLink, Script, in_loop, listening, reserving, running, saying

HELD = ("headrace.", "_asyncio.Task", "httptools.")


@pytest.fixture
def garbage() -> Iterator[Garbage]:
    with Garbage() as found:
        yield found


async def answered(url: str, path: str, body: dict[str, Any]) -> None:
    """Ask with a client of its own: what that lets go of is not the server's."""
    async with httpx.AsyncClient(base_url=url) as http:
        await http.post(path, json=body)


async def assert_let_go(garbage: Garbage) -> None:
    loop = asyncio.get_running_loop()
    late = loop.time() + 5
    while any(type(each) is Exchange for each in gc.get_objects()) and loop.time() < late:
        await asyncio.sleep(0.01)  # until the server knows that the client has gone
    assert not {name for name in garbage.found() if name.startswith(HELD)}
    assert not [each for each in gc.get_objects() if type(each) is Exchange]


@pytest.mark.parametrize(("path", "role", "body", "requests"), REQUESTS)
@in_loop
async def test_clients_that_leave(
    path: str, role: str, body: dict[str, Any], requests: int, tokenizer: Tokenizer, garbage: Garbage
) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role=role) as service, listening(service) as url:
        garbage.forget()
        asked = asyncio.create_task(answered(url, path, body))
        await link.wait_for(Submit, requests)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await link.wait_for(Abort, requests)
        await assert_let_go(garbage)


def fails_after_a_word(tokenizer: Tokenizer) -> Script:
    """The first request fails at once, and others after a word."""
    error = ErrorInfo(code="stage_failed", message="the stage has failed", status=503)

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        if len(link.of(Submit)) > 1:
            yield Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello")))
        yield RequestFailed(rid=submit.rid, error=error)

    return script


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x"},
        {"prompt": "x", "stream": True},
        {"prompt": ["x", "y"], "n": 2},
        {"prompt": "x", "n": 3, "stream": True},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": 5.5},
    ],
    ids=str,
)
@in_loop
async def test_answers_and_errors(body: dict[str, Any], fails: bool, tokenizer: Tokenizer, garbage: Garbage) -> None:
    link = FakeLink(fails_after_a_word(tokenizer) if fails else saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, listening(service) as url:
        garbage.forget()
        await answered(url, "/v1/completions", body)
        await assert_let_go(garbage)


@in_loop
async def test_clients_that_leave_between_two_tokens(tokenizer: Tokenizer, garbage: Garbage) -> None:
    def script(_link: FakeLink, submit: Submit) -> list[Tokens]:
        return [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello")))]

    link = FakeLink(script)
    async with running(link, tokenizer) as service, listening(service) as url:
        garbage.forget()
        async with httpx.AsyncClient(base_url=url) as http:
            async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
                await anext(response.aiter_lines())
            await link.wait_for(Abort)
        await assert_let_go(garbage)


@pytest.mark.parametrize("leaves", [False, True])
@in_loop
async def test_prompts_that_a_prefill_server_computes(leaves: bool, tokenizer: Tokenizer, garbage: Garbage) -> None:
    there = FakeLink(None if leaves else saying(tokenizer, "h"))
    here = FakeLink(reserving if leaves else fetched(tokenizer))
    async with (
        running(there, tokenizer, role="prefill") as prefill,
        listening(prefill) as prefill_url,
        running(here, tokenizer, role="decode", prefill=(prefill_url,)) as service,
        listening(service) as url,
    ):
        await here.wait_for(AddPrefill)
        welcoming(here, prefill_url)
        await service.readiness.wait_engine_ready()
        garbage.forget()
        asked = asyncio.create_task(answered(url, "/v1/completions", {"prompt": "x"}))
        await there.wait_for(Submit)
        if leaves:
            asked.cancel()
            await here.wait_for(Abort)
            await there.wait_for(Abort)
        await asyncio.gather(asked, return_exceptions=True)
        await assert_let_go(garbage)
