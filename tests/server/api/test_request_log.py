"""The request log: one line for each request with a prompt, whatever its end, with its ids on other servers."""

import asyncio
import logging
import re

import httpx
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import RequestFailed, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.request.request_context import RequestContext
from headrace.server.frontend.request_log import REFUSALS_AT_ONCE, RequestLog, RequestRecord
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, Prefills, decode, fetched
from tests.server.fakes import FakeLink, client, finished, in_loop, listening, running, saying

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
IDS = {"X-Request-Id": "order-7", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.server.frontend.request_log")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]


@in_loop
async def test_a_request_that_ends_well(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakeLink(saying(tokenizer, "hello")), tokenizer) as service, client(service) as http:
        answer = await http.post("/v1/completions", json={"prompt": [1, 2, 3]}, headers=IDS)
        assert (await http.get("/v1/models")).status_code == 200
    assert answer.headers["x-request-id"] == "order-7"
    (line,) = lines(caplog)
    assert line.startswith(f"request id=order-7 route=/v1/completions status=200 trace={TRACE} rid=cmpl-")
    assert " outcome=length prompt=3 cached=0 generated=1 " in line
    assert re.search(r" ttft_s=[0-9.]+ bootstrap_s=[0-9.]+ queue_s=.* decode_s=[0-9.]+ total_s=[0-9.]+$", line)


@in_loop
async def test_choices_are_added_up(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakeLink(saying(tokenizer, "hello")), tokenizer) as service, client(service) as http:
        await http.post("/v1/completions", json={"prompt": [[1, 2], [3, 4, 5]], "n": 2})
    (line,) = lines(caplog)
    assert ' and 3 more"' in line
    assert " prompt=10 " in line


@in_loop
async def test_ids_go_on_to_the_prefill_server(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        await http.post("/v1/completions", json={"prompt": "x"}, headers=IDS)
    ((_, _, headers),) = prefills.posts
    assert (headers["x-request-id"], headers["traceparent"]) == ("order-7", IDS["traceparent"])
    (line,) = lines(caplog)
    assert f"peer={ONE}" in line


@in_loop
async def test_a_request_that_fails(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def failing(_link: FakeLink, submit: Submit) -> list[Tokens | RequestFailed]:
        error = ErrorInfo(code="stage_failed", message='stage 1 said "no"\n\x1b[31m', status=503)
        return [Tokens(rid=submit.rid, tokens=(7,)), RequestFailed(rid=submit.rid, error=error)]

    async with running(FakeLink(failing), tokenizer) as service, client(service) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        assert (await http.post("/v1/completions", json={"prompt": "x", "stream": True})).status_code == 200
    whole, stream = lines(caplog)
    for line, status in ((whole, 503), (stream, 200)):
        assert f" status={status} " in line
        assert " outcome=stage_failed " in line
        assert r'error="stage 1 said \"no\"\n\u001b[31m"' in line
    assert {record.levelname for record in caplog.records if "outcome=" in record.getMessage()} == {"WARNING"}


@in_loop
async def test_a_client_that_disconnects(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, listening(service) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
            await link.wait_for(Submit)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        while not lines(caplog):
            await asyncio.sleep(0.01)
    assert re.search(r" status=499 rid=cmpl-\w+ outcome=disconnected ", lines(caplog)[0])


@in_loop
async def test_a_prompt_that_is_handed_over(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    def compute(_link: FakeLink, submit: Submit) -> list[object]:
        return [Tokens(rid=submit.rid, tokens=(7,)), finished(submit.rid, "handed_over")]

    async with running(FakeLink(compute), tokenizer, role="prefill") as service, client(service) as http:
        await http.post("/v1/prefill", json={"prompt": "x", "ticket": "t", "rid": "pf-1"}, headers=IDS)
    (line,) = lines(caplog)
    assert f"id=order-7 route=/v1/prefill status=200 trace={TRACE} rid=pf-1 outcome=handed_over" in line


@in_loop
async def test_a_refused_body(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        await http.post("/v1/completions", json={"prompt": ""})
    (line,) = lines(caplog)
    assert " status=400 outcome=empty_prompt " in line
    assert 'error="prompt is empty' in line


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(0.0)
    for _ in range(1000):
        log.write(RequestRecord(RequestContext("i")), "other", 401, 0.0, now=0.0)
    assert len(lines(caplog)) == REFUSALS_AT_ONCE
    log.write(RequestRecord(RequestContext("i")), "other", 401, 0.0, now=1.0)
    assert f"refusals_not_logged={1000 - REFUSALS_AT_ONCE}" in lines(caplog)[-1]
