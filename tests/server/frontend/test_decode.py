"""A decode server's prompts at its prefill servers: what is sent, relayed and refused, and local fallback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, Reserved, Tokens
from headrace.core.types.requests.request import DecodeHere, FetchFrom, SendTo
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ANSWER, ONE, Prefills, decode, fetched, until_ready, welcoming
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, reserving, running, saying


@in_loop
async def test_a_prompt_is_computed_there_and_continued_here(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with (
        running(
            link, tokenizer, role="decode", prefill=(ONE,), prefill_api_key="k", prefill_transport=prefills
        ) as service,
        client(service) as http,
    ):
        unready = await http.get("/ready")
        assert (unready.status_code, json_of(unready)["error"]["code"]) == (503, "no_prefill_server")
        assert await link.wait_for(AddPrefill) == AddPrefill(name=ONE, endpoint="tcp://p1:5001")
        welcoming(link, ONE)
        await until_ready(http)
        body = {"prompt": [1, 2, 3], "max_tokens": 9, "temperature": 0, "seed": 4, "stop": "\n\n", "deadline_s": 3}
        answer = json_of(await http.post("/v1/completions", json=body))
    assert answer["choices"][0]["text"] == "hello"
    (submit,) = link.of(Submit)
    ((host, asked, headers),) = prefills.posts
    assert submit.route == FetchFrom(ONE, asked["ticket"])
    assert (host, asked["rid"]) == ("p1", submit.rid)
    assert (asked["prompt_token_ids"], asked["max_tokens"], asked["temperature"]) == ([1, 2, 3], 9, 0)
    assert (asked["seed"], asked["stop"], asked["deadline_s"], asked["ignore_eos"]) == (4, ["\n\n"], 3, False)
    assert headers["authorization"] == "Bearer k"
    timing = answer["headrace"]["timing_ms"]
    assert timing == {"queue": 1, "bootstrap": 2, "forward": 30, "transfer": 4, "decode": 50.5, "total": 87.5}


@in_loop
async def test_a_prefill_server_takes_exactly_what_a_decode_server_sends(tokenizer: Tokenizer) -> None:
    """The body goes through a real prefill front end."""
    received: list[Submit] = []

    def compute(_link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        received.append(submit)
        return [Tokens(rid=submit.rid, tokens=(7,)), finished(submit.rid, "handed_over")]

    link = FakeLink(fetched(tokenizer))
    body = {"prompt": "hello", "top_k": 3, "min_tokens": 1, "logprobs": 2, "prompt_logprobs": 1, "cache_salt": "s"}
    async with running(FakeLink(compute), tokenizer, role="prefill") as far, client(far) as far_http:

        class Relay(Prefills):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                if request.url.path == "/v1/handoff":
                    return await super().handle_async_request(request)
                return await far_http.post("/v1/prefill", content=await request.aread())

        async with decode(link, tokenizer, Relay()) as (_, http):
            for stream in (False, True):
                options = {"stream": stream, "stream_options": {"include_progress": stream}}
                response = await http.post("/v1/completions", json={**body, **options})
                assert response.status_code == 200, response.text
    for there, here in zip(received, link.of(Submit), strict=True):
        assert there.prompt == here.prompt
        assert there.sampling == here.sampling
        assert isinstance(here.route, FetchFrom)
        assert (there.route, there.terms.cache_salt) == (SendTo(here.route.ticket), "s")


@in_loop
async def test_progress_is_relayed(tokenizer: Tokenizer) -> None:
    release = asyncio.Event()

    class Events(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b'event: bootstrapped\ndata: {"done":0,"total":3}\n\n'
            yield b'event: progress\ndata: {"done":2,"total":3}\n\n'
            await release.wait()
            yield b"event: done\ndata: " + msgspec.json.encode(ANSWER) + b"\n\n"

    link = FakeLink(reserving)
    prefills = Prefills(lambda body: httpx.Response(200, stream=Events()) if body["stream"] else httpx.Response(500))
    async with running(link, tokenizer, role="decode", prefill=(ONE,), prefill_transport=prefills) as service:
        await link.wait_for(AddPrefill)
        welcoming(link, ONE)
        async with client(service) as http:
            await until_ready(http)
            body = {"prompt": "x", "stream": True, "stream_options": {"include_progress": True, "include_usage": True}}
            asked = asyncio.create_task(http.post("/v1/completions", json=body))
            submit = await link.wait_for(Submit)
            await prefills.posted.wait()
            release.set()
            for output in saying(tokenizer, "hello")(link, submit):
                link.say(output)
            lines = [line for line in (await asked).text.split("\n\n") if "headrace" in line]
    chunks = [msgspec.json.decode(line.removeprefix("data: "))["headrace"] for line in lines]
    seen_progress = [chunk for chunk in chunks if "phase" in chunk]
    assert {"choice": 0, "phase": "computing", "done": 2, "total": 3} in seen_progress
    assert chunks[-1]["timing_ms"]["forward"] == 30


REFUSALS = [
    (429, {"code": "queue_full", "message": "full"}, {"Retry-After": "7"}, 429, "queue_full"),
    (400, {"code": "prompt_too_long", "message": "9 over 8", "param": "prompt"}, {}, 400, "prompt_too_long"),
    (503, {"code": "draining", "message": "bye"}, {}, 503, "draining"),
    (504, {"code": "no_peer", "message": "nobody"}, {}, 504, "no_peer"),
    (401, {"code": "invalid_api_key", "message": "no key"}, {}, 502, "prefill_failed"),
    (409, {"code": "ticket_in_use", "message": "used"}, {}, 502, "prefill_failed"),
    (404, {"code": "x", "message": "no route"}, {}, 502, "prefill_failed"),
    (500, {"code": "internal_error", "message": "oops"}, {}, 502, "prefill_failed"),
    (500, {"code": "nonfinite_values", "message": "NaN", "param": "prompt"}, {}, 500, "nonfinite_values"),
]


@pytest.mark.parametrize(("status", "error", "headers", "told", "code"), REFUSALS)
@in_loop
async def test_what_the_prefill_server_refuses_ends_the_request_here(
    status: int, error: dict[str, str], headers: dict[str, str], told: int, code: str, tokenizer: Tokenizer
) -> None:
    link = FakeLink(reserving)
    prefills = Prefills(lambda _body: httpx.Response(status, json={"error": error}, headers=headers))
    async with decode(link, tokenizer, prefills) as (_, http):
        response = await http.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, json_of(response)["error"]["code"]) == (told, code)
    assert error["message"] in json_of(response)["error"]["message"]
    unsaid = "1" if told in (503, 504) else None
    assert response.headers.get("retry-after") == headers.get("Retry-After", unsaid)
    assert link.of(Abort)[0].error.code == code


@pytest.mark.parametrize("broken", [b"<html>", b"{}x", b'{"timing_ms": 3}'])
@in_loop
async def test_responses_that_cannot_be_decoded_are_a_bad_gateway(broken: bytes, tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(reserving), Prefills(lambda _body: httpx.Response(200, content=broken))
    async with decode(link, tokenizer, prefills) as (_, http):
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 502


@in_loop
async def test_a_client_that_leaves_closes_the_call_to_the_prefill_server(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(reserving), Prefills()
    prefills.hold.clear()
    async with decode(link, tokenizer, prefills) as (_, http):
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await prefills.posted.wait()
        asked.cancel()
        await prefills.dropped.wait()
        assert (await link.wait_for(Abort)).error.status == 499


@pytest.mark.parametrize("said", ["boom", '{"error": {"code": "nonfinite_values", "message": "NaN"}}'])
@in_loop
async def test_local_fallback(said: str, tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(), Prefills(lambda _body: httpx.Response(500, text=said))

    def script(_link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        here = isinstance(submit.route, DecodeHere)
        return list(saying(tokenizer, "hello")(link, submit)) if here else list(reserving(link, submit))

    link.script = script
    async with (
        running(
            link, tokenizer, role="decode", prefill=(ONE,), fallback="local", prefill_transport=prefills
        ) as service,
        client(service) as http,
    ):
        assert (await http.get("/ready")).status_code == 200, "it can serve without a prefill server"
        answer = await http.post("/v1/completions", json={"prompt": "x"})
        assert json_of(answer)["choices"][0]["text"] == "hello"
        assert [submit.route for submit in link.of(Submit)] == [DecodeHere()]
        await link.wait_for(AddPrefill)
        welcoming(link, ONE)
        while service.readiness.not_ready() is None and len(link.of(Submit)) < 3:
            answer = await http.post("/v1/completions", json={"prompt": "x"})
            assert json_of(answer)["choices"][0]["text"] == "hello"
        *_, failed, local = link.of(Submit)
        assert (type(failed.route), type(local.route)) == (FetchFrom, DecodeHere)
        assert local.rid != failed.rid


@in_loop
async def test_no_fallback_after_a_token_was_sent_or_for_client_errors(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        return [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello"))), *reserving(link, submit)]

    for status, before in ((500, script), (400, reserving)):
        link = FakeLink(before)
        prefills = Prefills(lambda _body, status=status: httpx.Response(status, json={}))  # type: ignore[misc]
        async with (
            running(
                link, tokenizer, role="decode", prefill=(ONE,), fallback="local", prefill_transport=prefills
            ) as service,
            client(service) as http,
        ):
            await link.wait_for(AddPrefill)
            welcoming(link, ONE)
            while not service.prefills.servers()[0].up:
                await asyncio.sleep(0)
            response = await http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == (502 if status == 500 else 400)
        assert [type(submit.route) for submit in link.of(Submit)] == [FetchFrom]


def preempted_once(tokenizer: Tokenizer) -> Callable[[FakeLink, Submit], Iterable[AnySchedulerReply]]:
    """A script: the KV comes, and is to be fetched again after two tokens of "hello there"."""
    ids = tokenizer.encode("hello there")

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        yield from reserving(link, submit)
        yield Tokens(rid=submit.rid, tokens=tuple(ids[:2]))
        yield Reserved(rid=submit.rid, ticket="again", tokens=len(submit.prompt) // 4 + 1)
        yield from (Tokens(rid=submit.rid, tokens=(token,)) for token in ids[2:])
        yield finished(submit.rid, "length", completion=len(ids))

    return script


@in_loop
async def test_a_preempted_request_has_its_tokens_posted_again(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(preempted_once(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        body = {
            "prompt": [1, 2, 3],
            "max_tokens": 9,
            "temperature": 0.5,
            "stop": "xyz",
            "cache_salt": "s",
            "deadline_s": 9,
        }
        answer = json_of(await http.post("/v1/completions", json=body))
    assert answer["choices"][0]["text"] == "hello there"
    first, again = (asked for _, asked, _ in prefills.posts)
    assert again["ticket"] == "again" != first["ticket"]
    assert again["prompt_token_ids"] == [1, 2, 3, tokenizer.encode("hello there")[0]]
    assert (again["max_tokens"], again["ignore_eos"], again["stop"]) == (2, True, []), "no token ends it there"
    assert again["cache_salt"] == "s"
    assert again.get("deadline_s") is None


@in_loop
async def test_a_refusal_of_what_is_posted_again_is_told_to_the_scheduler(tokenizer: Tokenizer) -> None:
    def answer(body: dict[str, Any]) -> httpx.Response:
        refusal = {"error": {"code": "queue_full", "message": "full"}}
        return httpx.Response(429, json=refusal) if body["ticket"] == "again" else httpx.Response(200, json=ANSWER)

    link = FakeLink(preempted_once(tokenizer))
    async with decode(link, tokenizer, Prefills(answer)) as (_, http):
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": [1, 2, 3]}))
        abort = await link.wait_for(Abort)
        assert abort.error is not None
        assert (abort.error.code, abort.error.at_prefill) == ("queue_full", True)
        assert (await asked).status_code == 200, "the scheduler goes on without it"
