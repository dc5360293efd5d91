"""Bad input: every error has the right status, names the field and says what is allowed."""

from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import QueryStats, RefuseTicket
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import LENGTH, FakeLink, client, in_loop, json_of, running, saying

CHAT = [{"role": "user", "content": "x"}]
COMPLETION_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, "prompt", "required"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [[1], []]}, 400, "prompt[1]", "empty"),
    ({"prompt": ["x", 1]}, 400, "prompt", "mixes"),
    ({"prompt": {"a": 1}}, 400, "prompt", "a string or a list, got an object"),
    ({"prompt": [1.5]}, 400, "prompt[0]", "a whole number or a string or a list, got a number"),
    ({"prompt": [True]}, 400, "prompt[0]", "got true or false"),
    ({"prompt": [3, 9999]}, 400, "prompt[1]", "9999, outside the vocabulary of 268"),
    ({"prompt": [[1], [-1]]}, 400, "prompt[1][0]", "-1, outside the vocabulary"),
    ({"prompt": [10**30]}, 400, "prompt[0]", "to 9223372036854775807"),
    ({"prompt": [(1 << 63) - 1]}, 400, "prompt[0]", "outside the vocabulary"),
    ({"prompt": [5] * LENGTH}, 400, "prompt", f"{LENGTH} tokens; with one generated token the limit is {LENGTH}"),
    ({"prompt": "z" * 300}, 400, "prompt", f"300 tokens; with one generated token the limit is {LENGTH}"),
    ({"prompt": "z" * 999}, 400, "prompt", "999 bytes, which are at least 167 tokens; with one generated token the"),
    ({"prompt": ["x", "é" * 999]}, 400, "prompt[1]", "1998 bytes, which are at least 333 tokens"),
    ({"prompt": ["x"] * 257}, 400, "prompt", "257 prompts; at most 256"),
    ({"prompt": "x", "model": "gpt-4"}, 404, "model", "'gpt-4' is not served here; this is 'tiny'"),
    ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "expected a number"),
    ({"prompt": "x", "temperature": -0.1}, 400, "temperature", "from 0 to 2"),
    ({"prompt": "x", "temperature": 2.1}, 400, "temperature", "from 0 to 2"),
    ({"prompt": "x", "top_p": -0.1}, 400, "top_p", "from 0 to 1"),
    ({"prompt": "x", "top_p": 1.1}, 400, "top_p", "from 0 to 1"),
    ({"prompt": "x", "top_k": -2}, 400, "top_k", "at least -1"),
    ({"prompt": "x", "top_k": 1.5}, 400, "top_k", "expected a whole number"),
    ({"prompt": "x", "min_p": 1.5}, 400, "min_p", "from 0 to 1"),
    ({"prompt": "x", "seed": 1 << 64}, 400, "seed", "seed is"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
    ({"prompt": "x", "max_tokens": "9"}, 400, "max_tokens", "expected a whole number"),
    ({"prompt": "x", "max_tokens": 3, "min_tokens": 4}, 400, "min_tokens", "from 0 to 3"),
    ({"prompt": "x", "n": 17}, 400, "n", "from 1 to 16"),
    ({"prompt": "x", "n": 0}, 400, "n", "from 1 to 16"),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    ({"prompt": "x", "prompt_logprobs": -1}, 400, "prompt_logprobs", "from 0 to 20"),
    ({"prompt": "x", "prompt_logprobs_start": 1}, 400, "prompt_logprobs_start", "needs prompt_logprobs"),
    ({"prompt": "ab", "prompt_logprobs": 0, "prompt_logprobs_start": 3}, 400, "prompt_logprobs_start", "from 0 to 2"),
    ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "17 items; at most 16"),
    ({"prompt": "x", "stop": ["a", ""]}, 400, "stop[1]", "0 characters; 1 to 1024"),
    ({"prompt": "x", "stop": 3}, 400, "stop", "a string or a list, got a whole number"),
    ({"prompt": "x", "stop_token_ids": [0, 999]}, 400, "stop_token_ids[1]", "outside the vocabulary"),
    ({"prompt": "x", "stream": "yes"}, 400, "stream", "expected true or false"),
    ({"prompt": "x", "deadline_s": 0}, 400, "deadline_s", "above 0"),
    ({"prompt": "x", "cache_salt": "s" * 257}, 400, "cache_salt", "at most 256"),
    ({"prompt": "x", "extra_key": "s" * 257}, 400, "extra_key", "at most 256"),
    ({"prompt": ["x", "y"], "cache_salt": ["s", "t"]}, 400, "cache_salt", "expected a string, got a list"),
    ({"prompt": "x", "priority": 1 << 40}, 400, "priority", "from"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix", "not supported"),
    ({"prompt": "x", "n": 3, "best_of": 2}, 400, "best_of", "is 2; it has to be at least n, which is 3"),
    ({"prompt": "x", "best_of": 17}, 400, "best_of", "is 17; it has to be from 1 to 16"),
    ({"prompt": "x", "best_of": 3, "stream": True}, 400, "best_of", "is 3 and n is 1: which of them"),
    ({"prompt": "x", "frequency_penalty": 2.5}, 400, "frequency_penalty", "is 2.5; it has to be from -2 to 2"),
    ({"prompt": "x", "presence_penalty": -3}, 400, "presence_penalty", "is -3; it has to be from -2 to 2"),
    ({"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty", "is 0; it has to be from 0.01 to 100"),
    ({"prompt": "x", "repetition_penalty": "1"}, 400, "repetition_penalty", "expected a number"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, 400, "logit_bias[...]", "has to be from -100 to 100"),
    ({"prompt": "x", "logit_bias": {"the": 1}}, 400, "logit_bias", "'the', which is no token id from 0 to 267"),
    ({"prompt": "x", "logit_bias": {"268": 1}}, 400, "logit_bias", "'268', which is no token id from 0 to 267"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, 400, "logit_bias", "'-1', which is no token id"),
    ({"prompt": "x", "logit_bias": {"9" * 999: 1}}, 400, "logit_bias", "(999 characters)"),
    ({"prompt": "x", "logit_bias": {"5": "much"}}, 400, "logit_bias[...]", "expected a number"),
    ({"prompt": "x", "logit_bias": [1]}, 400, "logit_bias", "expected an object"),
    (
        {"prompt": "x", "logit_bias": {str(token): 1 for token in range(1025)}},
        400,
        "logit_bias",
        "has 1025 items; at most 1024 are allowed",
    ),
]
CHAT_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 400, "messages", "required"),
    ({"messages": []}, 400, "messages", "empty"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role", "required"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content", "got a whole number"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content[0].image_url",
        "required",
    ),
    ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages[0].role", "it has to be system"),
    ({"messages": [{"role": "user", "content": "z" * 999}]}, 400, "messages", "bytes, which are at least"),
    ({"messages": CHAT, "tools": [{"type": "function"}]}, 400, "tools[0].function", "required"),
    ({"messages": CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type", "supported are text"),
    ({"messages": CHAT, "top_logprobs": 3}, 400, "top_logprobs", "needs logprobs"),
    ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", "from 0 to 20"),
    ({"messages": CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens", "at least 1"),
]
PREFILL_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"ticket": "t"}, 400, "prompt", "exactly one of"),
    ({"ticket": "t", "prompt": "x", "messages": CHAT}, 400, "messages", "prompt and messages are given together"),
    ({"ticket": "t", "prompt_token_ids": []}, 400, "prompt_token_ids", "empty"),
    ({"ticket": "t", "prompt_token_ids": [1, 999]}, 400, "prompt_token_ids[1]", "outside the vocabulary"),
    ({"prompt": "x"}, 400, "ticket", "ticket is required"),
    ({"prompt": "x", "ticket": ""}, 400, "ticket", "1 to 256"),
    ({"prompt": "x", "ticket": 7}, 400, "ticket", "expected a string, got a whole number"),
    ({"prompt": "x", "ticket": "t", "handoff": "none"}, 400, "ticket", "contradict"),
    ({"prompt": "x", "handoff": "wire"}, 400, "handoff", '"none"'),
    ({"prompt": "x", "ticket": "t", "rid": "a b"}, 400, "rid", "without spaces"),
    ({"prompt": "x", "ticket": "t", "temperatur": 1}, 400, "temperatur", "did you mean temperature?"),
    ({"prompt": "x", "ticket": "t", "zzz": 1}, 400, "zzz", "unknown field zzz"),
    ({"prompt": "x", "ticket": "t", "max_tokens": -1}, 400, "max_tokens", "at least 0"),
    ({"prompt": "x", "ticket": "t", "max_tokens": 0, "min_tokens": 1}, 400, "min_tokens", "has to be 0 where"),
    ({"prompt": "x", "ticket": "t", "model": "no"}, 404, "model", "not served"),
]
RESPONSES_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"input": "z" * 999}, 400, "input", "bytes, which are at least"),
    ({"input": [{"type": "t" * 999}]}, 400, "input[0]", "(999 characters)"),
]
GENERATE_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"text": "x", "sampling_params": {name: -9}}, 400, f"sampling_params.{name}", f"sampling_params.{name} is -9")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
] + [
    ({"text": "x", "sampling_params": {"logit_bias": {"999": 1}}}, 400, "sampling_params.logit_bias", "no token id"),
]
TOKENIZER_MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"tokens": [1, -1]}, 400, "tokens[1]", "-1, outside the vocabulary"),
    ({"tokens": [1 << 40]}, 400, "tokens[0]", "outside the vocabulary"),
    ({"tokens": [1], "model": "m" * 999}, 404, "model", "(999 characters)"),
]
ROUTES = [
    ("/v1/completions", "colocated", COMPLETION_MISTAKES),
    ("/v1/chat/completions", "colocated", CHAT_MISTAKES),
    ("/v1/prefill", "prefill", PREFILL_MISTAKES),
    ("/v1/responses", "colocated", RESPONSES_MISTAKES),
    ("/generate", "colocated", GENERATE_MISTAKES),
    ("/detokenize", "colocated", TOKENIZER_MISTAKES),
]


@pytest.mark.parametrize(("path", "role", "mistakes"), ROUTES, ids=[path for path, _, _ in ROUTES])
@in_loop
async def test_mistakes_are_named(
    path: str, role: str, mistakes: list[tuple[dict[str, Any], int, str, str]], tokenizer: Tokenizer
) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role=role) as service, client(service) as http:
        for body, status, field, message in mistakes:
            response = await http.post(path, json=body)
            error = json_of(response)["error"]
            assert (response.status_code, error["param"]) == (status, field), (body, error)
            assert message in error["message"], (body, error)
            assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
            assert error["code"]
    kinds = {type(message) for message in link.sent}
    assert kinds <= {QueryStats, RefuseTicket}, "nothing wrong reaches the scheduler but for the peer's sake"


HARMLESS = {
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "tools": [],
    "response_format": {"type": "text"},
    "echo": False,
    "skip_special_tokens": True,
    "user": "me",
    "stream_options": None,
}


@in_loop
async def test_defaults_spelled_out_and_labels_do_no_harm(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
            assert (await http.post(path, json={**body, **HARMLESS})).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": NaN}',
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 10_000,
    ],
    ids=lambda content: repr(content[:20]),
)
@in_loop
async def test_bodies_that_are_no_json(tokenizer: Tokenizer, content: bytes) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.post("/v1/completions", content=content)
    assert response.status_code == 400, response.text
    assert json_of(response)["error"]["type"] == "invalid_request_error"


@in_loop
async def test_bodies_over_the_limit(tokenizer: Tokenizer) -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b'{"prompt": "' + b"x" * 100

    async with running(FakeLink(), tokenizer, max_body_bytes=2000) as service, client(service) as http:
        declared = await http.post("/v1/completions", content=b"x" * 2001)
        chunked = await http.post("/v1/completions", content=parts())
        fits = await http.post("/v1/completions", content=b"x" * 2000)
    for response in (declared, chunked):
        assert response.status_code == 413
        assert "2000 bytes (--max-body-bytes)" in json_of(response)["error"]["message"]
    assert fits.status_code == 400


@in_loop
async def test_unknown_paths_and_methods(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        missing = await http.get("/v2/completions")
        wrong = await http.get("/v1/completions")
        rid = await http.delete("/v1/prefill/nobody")
    assert (missing.status_code, json_of(missing)["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, json_of(wrong)["error"]["code"], wrong.headers["allow"]) == (
        405,
        "method_not_allowed",
        "OPTIONS, POST",
    )
    assert (rid.status_code, json_of(rid)["error"]["code"], json_of(rid)["error"]["param"]) == (
        404,
        "unknown_rid",
        "rid",
    )


@in_loop
async def test_routes_of_other_roles_say_where_to_go(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, role="prefill") as service, client(service) as http:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": CHAT})):
            response = await http.post(path, json=body)
            assert response.status_code == 404
            assert "/v1/prefill" in json_of(response)["error"]["message"]
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.post("/v1/prefill", json={"prompt": "x", "ticket": "t"})
        assert (response.status_code, json_of(response)["error"]["code"]) == (400, "wrong_role")
        assert (await http.get("/v1/handoff")).status_code == 404


@in_loop
async def test_keys(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer, api_keys=("one", "two")) as service, client(service) as http:

        async def ask(header: str | None) -> httpx.Response:
            headers = {} if header is None else {"Authorization": header}
            return await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)

        for header in (None, "", "one", "Bearer", "Bearer three", "Basic one", "Bearer one two"):
            response = await ask(header)
            assert response.status_code == 401, header
            assert json_of(response)["error"]["code"] == "invalid_api_key"
        for header in ("Bearer one", "bearer two"):
            assert (await ask(header)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200


@in_loop
async def test_a_bug_is_a_500_in_the_same_form(tokenizer: Tokenizer) -> None:
    def script(_link: FakeLink, _submit: object) -> list[Any]:
        return []

    async with running(FakeLink(script), tokenizer) as service, client(service) as http:
        service.completions.cancel = None  # type: ignore[assignment,method-assign]
        response = await http.delete("/v1/prefill/x")
    assert (response.status_code, json_of(response)["error"]["code"]) == (500, "internal_error")


@in_loop
async def test_the_clients_request_id_comes_back(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.get("/health", headers={"X-Request-Id": "abc"})
    assert response.headers["x-request-id"] == "abc"
