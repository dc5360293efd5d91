"""The server behind a worker: what it says of itself, its streams, and what becomes of a registration without it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Tokens
from headrace.core.types.errors import PREFILL_LOST, PREFILL_UNREACHABLE, ConfigError, ErrorInfo, HeadraceError
from headrace.integrations.dynamo.answer import chunk
from headrace.integrations.dynamo.presence import Presence
from headrace.integrations.dynamo.request import decode_body
from headrace.integrations.dynamo.server import Description, Server
from headrace.server.app import create_app
from headrace.text.tokenizer import Tokenizer
from tests.integrations.dynamo.requests import request
from tests.integrations.dynamo.test_command import settings
from tests.server.fakes import FakeLink, failing, in_loop, running, saying

URL = "http://server"


@asynccontextmanager
async def served(tokenizer: Tokenizer, link: FakeLink | None = None, **config: Any) -> AsyncIterator[Server]:
    """A Server whose requests come to the application of a real one."""
    async with running(link or FakeLink(), tokenizer, **config) as service:
        server = Server(settings("decode", "--url", URL), httpx.ASGITransport(app=create_app(service)))
        yield server
        await server.close()


@in_loop
async def test_what_a_server_says_of_itself(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, role="prefill", served_model_name="mine") as server:
        assert await server.problem() is None
        found = await server.describe()
        assert (found.kind, found.model, found.model_path) == ("prefill", "mine", "tiny")
        assert (found.context_length, found.page_size, found.replicas) == (64, 16, 1)
        assert await server.kv_events() is None
    async with served(tokenizer, role="decode", prefill=("http://p:1",)) as server:
        assert (await server.describe()).kind == "decode"
        assert await server.problem() is None, "without its own prefill servers it serves KV of others"
    async with served(tokenizer) as server:
        assert (await server.describe()).kind == "colocated"


@in_loop
async def test_a_stream_as_chunks(tokenizer: Tokenizer) -> None:
    async with served(tokenizer, FakeLink(saying(tokenizer, "hello world", cached=1))) as server:
        body = decode_body(request(logprobs=1, max_tokens=20), 64)
        chunks = [chunk(event) async for event in server.stream("/generate", body, {"x-request-id": "r"})]
    assert [token for each in chunks for token in each["token_ids"]] == tokenizer.encode("hello world")
    assert [len(each["log_probs"]) for each in chunks[:-1]] == [len(each["token_ids"]) for each in chunks[:-1]]
    assert all("finish_reason" not in each for each in chunks[:-1])
    last = chunks[-1]
    assert (last["token_ids"], last["finish_reason"]) == ([], "length")
    assert last["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


@in_loop
async def test_errors_before_and_in_a_stream(tokenizer: Tokenizer) -> None:
    lost = ErrorInfo(code="stage_failed", message="a stage is gone", status=503)

    def breaks(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        yield Tokens(rid=submit.rid, tokens=(104,))
        yield from failing(lost)(_link, submit)

    async with served(tokenizer, FakeLink(breaks)) as server:
        stream = server.stream("/generate", decode_body(request(), 64), {})
        assert (await anext(stream))["output_ids"] == [104]
        with pytest.raises(HeadraceError) as failed:
            await anext(stream)
        assert (failed.value.info.status, failed.value.info.message) == (503, "a stage is gone")
        with pytest.raises(HeadraceError) as refused:
            await server.post("/generate", decode_body(request(temperature=9.0), 64), {})
        assert (refused.value.info.status, refused.value.info.field) == (400, "sampling_params.temperature")


@in_loop
async def test_a_server_that_is_not_there() -> None:
    """Nothing listens on port 1."""
    server = Server(settings("decode", "--url", "http://127.0.0.1:1"))
    told: list[str] = []
    problem = await server.problem()
    assert problem is not None
    assert problem.code == PREFILL_UNREACHABLE
    with pytest.raises(ConfigError, match=r"is not ready after 0.6 seconds \(--wait\)"):
        await server.wait(0.6, told.append)
    assert len(told) == 1, "what does not change is said once in a while"
    assert "http://127.0.0.1:1" in told[0]
    await server.close()


class FakeEndpoint:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def register_endpoint_instance(self) -> None:
        self.calls.append("register")

    async def unregister_endpoint_instance(self) -> None:
        self.calls.append("unregister")


DESCRIBED = Description(
    kind="decode", model="m", model_path="p", context_length=64, page_size=16, pages=4, replicas=1, instance="a"
)


class Described:
    """A server that says this of itself."""

    url = URL

    def __init__(self, description: Description) -> None:
        self.description = description

    async def describe(self) -> Description:
        return self.description


def looked(problems: list[ErrorInfo | None], now: Description = DESCRIBED) -> tuple[list[str], list[str]]:
    """What a registration goes through, and the reasons to end."""

    async def run() -> tuple[list[str], list[str]]:
        endpoint, ends = FakeEndpoint(), list[str]()
        server: Any = Described(now)
        presence = Presence(server, DESCRIBED, endpoint, ends.append)
        for problem in problems:
            await presence.look(problem)
        return endpoint.calls, ends

    return asyncio.run(run())


LATE = ErrorInfo(code=PREFILL_LOST, message="ReadTimeout", status=502)
DRAINING = ErrorInfo(code="draining", message="draining", status=503)


@pytest.mark.parametrize(
    ("problems", "calls"),
    [
        ([None, None], []),
        ([LATE, None, LATE, None], []),
        ([LATE, LATE, LATE], ["unregister"]),
        ([DRAINING], ["unregister"]),
        ([DRAINING, LATE, LATE, None, None], ["unregister", "register"]),
        ([LATE, LATE, None, LATE, None, DRAINING], ["unregister", "register", "unregister"]),
    ],
)
def test_when_a_worker_is_registered(problems: list[ErrorInfo | None], calls: list[str]) -> None:
    assert looked(problems) == (calls, [])


def test_another_server_in_its_place() -> None:
    restarted = msgspec.structs.replace(DESCRIBED, instance="b")
    assert looked([DRAINING, None], restarted) == (["unregister", "register"], [])
    calls, (reason,) = looked([DRAINING, None], msgspec.structs.replace(DESCRIBED, page_size=32))
    assert calls == ["unregister"]
    assert "has come back as another server" in reason
