"""What a client gets through a router is what the decode server gives by itself."""

import json
from typing import Any

import httpx
import pytest

from tests.routers.fleet import KINDS, Router, Site, routed

pytestmark = pytest.mark.routers

STORY = "It was a bright cold day in April, and the clocks were striking thirteen. " * 8
COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": "The capital of France is"}),
    (COMPLETION, {"prompt": STORY}),
    (COMPLETION, {"prompt": "One token is all:", "max_tokens": 1}),
    (COMPLETION, {"prompt": "At least three tokens:", "min_tokens": 3}),
    (COMPLETION, {"prompt": "With logprobs:", "logprobs": 2}),
    (COMPLETION, {"prompt": ["The capital of France is", "Two and two are", STORY]}),
    (COMPLETION, {"prompt": ["The capital of France is", "Two and two are"], "n": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}),
    (CHAT, {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}], "n": 2}),
]
WITH_A_REAL_MODEL: list[tuple[str, dict[str, Any]]] = [
    (COMPLETION, {"prompt": ["The capital of France is", "Two and two are"]}),
    (COMPLETION, {"prompt": "Stop at the end of the sentence", "stop": [" is", "!"]}),
    (COMPLETION, {"prompt": "Sampled, with a seed:", "temperature": 0.8, "seed": 7}),
    (CHAT, {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}),
]
ANSWERED: list[dict[str, Any]] = [
    {"input": "The capital of France is"},
    {"input": STORY, "instructions": "Be brief."},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Why is the sky blue?"}]},
               {"role": "assistant", "content": "It is not."}, {"role": "user", "content": "Why?"}]},
    {"input": "One token is all:", "max_output_tokens": 1},
]  # fmt: skip
KNOW_RESPONSES = ("vllm-nixl", "vllm-mooncake", "dynamo")
ONE_CHOICE = ("dynamo",)
NO_GENERATE = ("xpyd", "dynamo")
DEFAULTS = {"max_tokens": 12, "temperature": 0}


def texts(response: httpx.Response) -> dict[int, str]:
    """Texts by the index of their choice, of a whole answer or of a stream."""
    assert response.status_code == 200, response.text
    parts = [response.json()]
    return _joined(parts)


def streamed(response: httpx.Response) -> dict[int, str]:
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return _joined([json.loads(line) for line in lines[:-1]])


def _joined(parts: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for part in parts:
        for choice in part.get("choices", []):
            message = choice.get("message") or choice.get("delta") or {}
            text = choice.get("text") or message.get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


def posted(site: Site) -> float:
    """Prompts that the decode server has posted to the prefill server by itself."""
    return site.prefill.metrics().get('headrace_http_requests_total{route="/v1/prefill",status="200"}', 0.0)


@pytest.mark.parametrize(("path", "body"), CASES)
def test_texts_are_the_decode_servers_own(router: Router, site: Site, path: str, body: dict[str, Any]) -> None:
    compare(router, site, path, body)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_real_model(kind: str, real_site: Site) -> None:
    with routed(kind, real_site) as router:
        for path, body in WITH_A_REAL_MODEL:
            compare(router, real_site, path, body)
        if kind in KNOW_RESPONSES:
            compare_responses(router, real_site, ANSWERED[0])


def compare(router: Router, site: Site, path: str, body: dict[str, Any]) -> None:
    """Whole and streamed, through the router and not."""
    body = {"model": site.model, **DEFAULTS, **body}
    if router.name in ONE_CHOICE and body.get("n", 1) > 1:
        assert router.post(path, body).status_code == 400
        return
    own = texts(site.decode.post(path, body))
    assert any(own.values())
    before = posted(site)
    assert texts(router.post(path, body)) == own
    assert streamed(router.post(path, {**body, "stream": True})) == own
    assert posted(site) == before, "the KV went under the router's name"
    site.quiet()


@pytest.mark.parametrize("body", ANSWERED)
def test_responses_where_the_router_knows_them(router: Router, site: Site, body: dict[str, Any]) -> None:
    if router.name in KNOW_RESPONSES:
        compare_responses(router, site, body)
        return
    for stream in (False, True):
        response = router.post(RESPONSES, {"model": site.model, **body, "stream": stream})
        assert response.status_code == (501 if router.name == "sglang" else 404)
    site.quiet()


def compare_responses(router: Router, site: Site, body: dict[str, Any]) -> None:
    """compare() for /v1/responses: the deltas of a stream, and the response that is its last event."""
    body = {"model": site.model, "max_output_tokens": 12, "temperature": 0, **body}
    own = site.decode.post(RESPONSES, body).json()
    assert text_of(own)
    before = posted(site)
    whole, stream = router.post(RESPONSES, body), router.post(RESPONSES, {**body, "stream": True})
    assert posted(site) == before, "the KV went under the router's name"
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text_of(own)
    for response in (whole.json(), events[-1]["response"]):
        assert (response["status"], text_of(response)) == (own["status"], text_of(own))
        assert response["usage"]["input_tokens"] == own["usage"]["input_tokens"]
        assert response["usage"]["output_tokens"] == own["usage"]["output_tokens"]
    site.quiet()


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_sglangs_own_form(router: Router, site: Site) -> None:
    if router.name in NO_GENERATE:
        pytest.skip(f"{router.name} has no /generate")
    for body in ({"text": "The capital of France is"}, {"input_ids": [[100, 101, 102], [1, 2, 3, 4]]}):
        body = {**body, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        own, through = site.decode.post("/generate", body).json(), router.post("/generate", body).json()
        if isinstance(own, list):
            assert [one["text"] for one in through] == [one["text"] for one in own]
        else:
            assert through["text"] == own["text"]
    site.quiet()


def test_logprobs_of_the_prompt_are_merged(router: Router, site: Site) -> None:
    if router.name not in ("sglang", "sglang-mini-lb", "vllm-mini-lb"):
        pytest.skip("only SGLang's flow merges them")
    sampling = {"max_new_tokens": 3, "temperature": 0}
    body = {"text": "The capital of France is", "sampling_params": sampling}
    about = router.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0}).json()["meta_info"]
    assert len(about["input_token_logprobs"]) == about["prompt_tokens"]
    assert all(logprob < 0 for logprob, *_ in about["input_token_logprobs"][1:])


def test_what_the_router_says_of_the_servers(router: Router, site: Site) -> None:
    models = router.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [site.model]
    assert router.get("/health").status_code == 200
    if router.name not in NO_GENERATE:
        assert router.get("/health_generate").status_code == 200
        assert router.get("/get_model_info").json()["served_model_name"] == site.model
