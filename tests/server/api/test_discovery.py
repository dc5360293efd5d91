"""Routes for routers: identity, control endpoint, health, load, tokenization."""

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, EngineState, Tokens
from headrace.core.stats import Sample, Stats
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.request import Discard
from headrace.server.app import create_bootstrap_app
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, failing, finished, in_loop, json_of, running, server_info


def computing(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    return [Tokens(rid=submit.rid, tokens=(7,)), finished(submit.rid)]


@pytest.mark.parametrize(("role", "mode"), [("prefill", "prefill"), ("decode", "decode"), ("colocated", "null")])
@in_loop
async def test_server_and_model_info(tokenizer: Tokenizer, role: str, mode: str) -> None:
    fields: dict[str, Any] = {"prefill": ("http://p:1",)} if role == "decode" else {}
    async with (
        running(FakeLink(), tokenizer, role=role, served_model_name="mine", **fields) as service,
        client(service) as http,
    ):
        infos = [json_of(await http.get(path)) for path in ("/server_info", "/get_server_info")]
        models = [json_of(await http.get(path)) for path in ("/model_info", "/get_model_info")]
        version = json_of(await http.get("/version"))
    assert infos[0] == infos[1]
    assert models[0] == models[1]
    info = infos[0]
    assert (info["disaggregation_mode"], info["model_id"], info["instance_id"]) == (mode, "mine", "i" * 32)
    assert (info["kv_block_size"], info["tp_size"], info["dp_size"], info["max_model_len"]) == (16, 1, 1, 64)
    assert info["data_parallel_replicas"] == 1
    assert (models[0]["model_path"], models[0]["is_generation"]) == ("tiny", True)
    assert version == {"version": info["version"]}


@in_loop
async def test_where_the_control_endpoint_is(tokenizer: Tokenizer) -> None:
    """Needs no key, also on the bootstrap port, which has few other routes."""
    worker = {"engine_id": "i" * 32, "worker_addr": {"0": {"0": "tcp://127.0.0.1:5555"}}}
    async with running(FakeLink(), tokenizer, role="prefill", api_keys=("k",), bootstrap_port=9) as service:
        async with client(service) as http:
            assert json_of(await http.get("/query")) == {"0": worker}
        transport = httpx.ASGITransport(app=create_bootstrap_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            assert json_of(await http.get("/query")) == {"0": worker}
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/v1/handoff")).status_code == 401
            handoff = json_of(await http.get("/v1/handoff", headers={"Authorization": "Bearer k"}))
            assert (handoff["control_port"], handoff["bootstrap_port"]) == (5555, 9)
            key = {"Authorization": "Bearer k"}
            assert (await http.post("/v1/completions", json={}, headers=key)).status_code == 404


@in_loop
async def test_a_server_without_a_control_endpoint_says_so(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.info = server_info(control_port=0)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.get("/query")).status_code == 503, "it may have one later"
    async with running(link, tokenizer) as service, client(service) as http:
        never = await http.get("/query")
        assert (never.status_code, json_of(never)["error"]["code"]) == (404, "wrong_role")


@in_loop
async def test_health_generate_computes_a_token(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.get("/health_generate")).status_code == 200
        (submit,) = link.of(Submit)
        assert (submit.route, submit.sampling.max_tokens, submit.terms.deadline_s) == (Discard(), 1, 20.0)
        link.script = failing(ErrorInfo(code="deadline_exceeded", message="not done in time", status=504))
        assert (await http.get("/health_generate")).status_code == 504
        link.say(EngineState(ready=False, reason="stage 0 died"))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)  # requests within one process may never let the event loop turn
        assert (await http.get("/health_generate")).status_code == 503
        assert (await http.get("/ping")).status_code == 503


@in_loop
async def test_load(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    queues = (("waiting", 3.0, 120.0), ("running", 2.0, 80.0))
    link.stats = Stats(
        tuple(Sample("queue_requests", requests, (queue,)) for queue, requests, _ in queues)
        + tuple(Sample("queue_tokens", tokens, (queue,)) for queue, _, tokens in queues)
    )
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 3, "num_tokens": 200}
    pages = tuple(
        Sample("kv_pages", number, (use,)) for number, use in ((5.0, "free"), (4.0, "cached"), (3.0, "leased"))
    )
    prompts = (Sample("prompt_tokens_total", 80.0), Sample("cached_tokens_total", 20.0))
    async with running(link, tokenizer) as service, client(service) as http:
        load = json_of(await http.get("/get_load"))
        assert load == [{**idle, "kv_pages": 0, "kv_pages_used": 0, "cache_hit_rate": None}]
        link.stats = Stats((*link.stats.samples, *pages, *prompts))
        load = json_of(await http.get("/get_load"))
        assert load == [{**idle, "kv_pages": 12, "kv_pages_used": 3, "cache_hit_rate": 0.25}]


@in_loop
async def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        text = json_of(await http.post("/tokenize", json={"prompt": "hello world"}))
        assert text == {"tokens": tokenizer.encode("hello world"), "count": 2, "max_model_len": 64}
        chat = json_of(await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hello"}]}))
        assert chat["tokens"] == tokenizer.encode_chat([{"role": "user", "content": "hello"}])
        back = json_of(await http.post("/detokenize", json={"tokens": text["tokens"]}))
        assert back == {"prompt": "hello world"}
        assert (await http.post("/tokenize", json={})).status_code == 400
        assert (await http.post("/detokenize", json={"tokens": "x"})).status_code == 400
