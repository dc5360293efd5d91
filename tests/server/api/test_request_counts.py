"""requests_total and the histograms of latency count what clients were answered, each prompt and choice once."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import Held, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import Timing, Usage
from headrace.server.telemetry.label_values import PROMPT_ROUTES
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, failing, finished, in_loop, listening, running, saying
from tests.server.frontend.test_failover import Several, refusal, three

BODY = {"prompt": [1, 2, 3]}


async def read(http: httpx.AsyncClient) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name and labels, sorted by their names."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families((await http.get("/metrics")).text):
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("headrace_"), {})[labels] = sample.value
    return found


async def ends(http: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """What was counted in requests_total, by outcome, reason and route."""
    return {labels: value for labels, value in (await read(http))["requests_total"].items() if value}


@in_loop
async def test_the_routes_are_those_that_take_prompts(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        paths = (await http.get("/openapi.json")).json()["paths"]
    posts = {path for path, operations in paths.items() if "post" in operations}
    rendering = {"/v1/completions/render", "/v1/chat/completions/render", "/tokenize", "/detokenize"}
    caching = {"/v1/prefixes", "/v1/audits", "/v1/returns", "/v1/kv_hints", "/v1/prefill/{id}/truncate"}
    assert posts - rendering - caching - {"/debug/record"} == set(PROMPT_ROUTES)


@in_loop
async def test_choices_count_one_by_one_and_tokens_as_the_client_was_told(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(saying(tokenizer, "hello there")), tokenizer) as service, client(service) as http:
        answer = await http.post("/v1/completions", json={"prompt": [[1, 2], [3, 4, 5]], "n": 2})
        metrics, counted = await read(http), await ends(http)
    usage = answer.json()["usage"]
    assert counted == {("finished", "length", "/v1/completions"): 4}
    assert metrics["request_generation_tokens_sum"][()] == usage["completion_tokens"]
    assert metrics["request_prompt_tokens_sum"][()] == 2 * usage["prompt_tokens"], "of each choice"
    assert metrics["e2e_request_latency_seconds_count"][()] == 4
    assert metrics["time_to_first_token_seconds_count"][()] == 4


@in_loop
async def test_time_between_tokens(tokenizer: Tokenizer) -> None:
    """Four messages, one of which has two tokens; the last one only ends the text."""

    async def talk(link: FakeLink, http: httpx.AsyncClient) -> None:
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await link.wait_for(Submit)
        rid = link.of(Submit)[0].rid
        for tokens in ((7,), (8,), (9, 10)):
            link.say(Tokens(rid=rid, tokens=tokens))
            await asyncio.sleep(0.03)
        link.say(finished(rid, "length", completion=4))
        assert (await asked).status_code == 200

    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        await talk(link, http)
        metrics = await read(http)
    assert metrics["inter_token_latency_seconds_count"][()] == 3
    assert 0.05 < metrics["inter_token_latency_seconds_sum"][()] < 2
    assert metrics["inter_token_latency_seconds_bucket"][("0.01",)] == 0
    assert metrics["request_time_per_output_token_seconds_count"][()] == 1
    whole = metrics["e2e_request_latency_seconds_sum"][()] - metrics["time_to_first_token_seconds_sum"][()]
    assert metrics["request_time_per_output_token_seconds_sum"][()] == pytest.approx(whole / 3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"prompt": ""}, "empty_prompt"), ({"prompt": "x", "max_token": 1}, "unknown_field"), (b"{", "invalid_json")],
)
@in_loop
async def test_refused_bodies(body: Any, reason: str, tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        content = body if isinstance(body, bytes) else None
        await http.post("/v1/chat/completions", json={"messages": "x"})
        await http.post("/v1/completions", json=None if content else body, content=content)
        await http.get("/v1/completions")
        await http.post("/tokenize", json={"prompt": 3})
        counted = await ends(http)
    assert counted.pop(("refused", reason, "/v1/completions")) == 1
    assert list(counted.values()) == [1], "and the chat"


@in_loop
async def test_wrong_keys_and_servers_that_are_full_or_not_ready(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with (
        running(link, tokenizer, api_keys=("secret",), max_queued_requests=1) as service,
        client(service) as http,
    ):
        await http.post("/v1/completions", json=BODY)
        http.headers["Authorization"] = "Bearer secret"
        asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await link.wait_for(Submit)
        assert (await http.post("/generate", json={"input_ids": [1]})).status_code == 429
        counted = await ends(http)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    assert counted == {
        ("refused", "invalid_api_key", "/v1/completions"): 1,
        ("refused", "queue_full", "/generate"): 1,
    }


@pytest.mark.parametrize(
    ("code", "status", "outcome"),
    [("deadline_exceeded", 504, "failed"), ("prompt_too_long", 400, "refused"), ("cancelled", 499, "cancelled")],
)
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_ends_that_the_scheduler_reports(
    code: str, status: int, outcome: str, stream: bool, tokenizer: Tokenizer
) -> None:
    error = ErrorInfo(code=code, message="no", status=status)
    async with running(FakeLink(failing(error)), tokenizer) as service, client(service) as http:
        await http.post("/v1/completions", json={**BODY, "stream": stream})
        assert await ends(http) == {(outcome, code, "/v1/completions"): 1}


@in_loop
async def test_a_client_that_disconnects(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, listening(service) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json=BODY))
            await link.wait_for(Submit)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        async with client(service) as http:
            while not (counted := await ends(http)):
                await asyncio.sleep(0.01)
    assert counted == {("cancelled", "cancelled", "/v1/completions"): 1}


@pytest.mark.parametrize(
    ("handoff", "end", "reason"),
    [(None, "handoff", "handoff"), ("none", "discarded", "discarded"), ("hold", "", "held")],
)
@in_loop
async def test_prompts_whose_kv_goes_elsewhere(
    handoff: str | None, end: str, reason: str, tokenizer: Tokenizer
) -> None:
    def compute(_link: FakeLink, submit: Submit) -> list[Any]:
        usage, timing = Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=0), Timing()
        last = finished(submit.rid, end) if end else Held(rid=submit.rid, usage=usage, timing=timing, lease_s=9.0)
        return [Tokens(rid=submit.rid, tokens=(7,)), last]

    body = {"prompt_token_ids": [1, 2, 3], "handoff": handoff, "ticket": None if handoff == "none" else "t"}
    async with running(FakeLink(compute), tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.post("/v1/prefill", json=body)).status_code == 200
        assert await ends(http) == {("finished", reason, "/v1/prefill"): 1}


@in_loop
async def test_a_prompt_that_goes_to_another_prefill_server_is_one_request(tokenizer: Tokenizer) -> None:
    async with three(tokenizer, Several(p1=refusal(429, "queue_full"))) as (_, http, _):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert await ends(http) == {("finished", "length", "/v1/completions"): 1}
