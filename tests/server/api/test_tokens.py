"""Token ids in and out: POST /inference/v1/generate, rendering, and return_token_ids."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import RefuseTicket, Submit
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import FetchFrom, SendTo, TokenLogprob
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_fields import AnyConstraint
from tests.server.api.test_handoff import NIXL, computing
from tests.server.fakes import FakeLink, client, in_loop, json_of, logprob_parts, running, saying

GENERATE = "/inference/v1/generate"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, without [DONE], which has to end it."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@in_loop
async def test_token_ids_out_are_all_that_were_generated(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world<eos>")
    sampling = {"max_tokens": 40, "temperature": 0, "seed": 3, "stop_token_ids": [], "min_tokens": 1}
    body = {"token_ids": [1, 2, 3], "request_id": "mine", "sampling_params": sampling, "return_token_ids": True}
    link = FakeLink(saying(tokenizer, "hello world<eos>", "stop", cached=1))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post(GENERATE, json=body))
        text = json_of(await http.post(GENERATE, json={**body, "output_mode": "text"}))
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = events(await http.post(GENERATE, json={**body, **options}))
        texts = events(await http.post(GENERATE, json={**body, **options, "output_mode": "text"}))
    assert answer["choices"] == [
        {"index": 0, "token_ids": ids, "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    ]
    assert (answer["prompt_token_ids"], answer["output_mode"]) == ([1, 2, 3], "tokens")
    assert answer["request_id"].startswith("mine-")
    assert answer["usage"] == {
        "prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids),
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert (text["choices"][0]["text"], text["choices"][0]["token_ids"]) == ("hello world", ids)
    for found in (stream, texts):
        *chunks, usage = found
        assert (usage["choices"], usage["usage"]) == ([], answer["usage"])
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == ids
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[1, 2, 3], *[None] * (len(chunks) - 1)]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(chunk["choices"][0]["text"] for chunk in texts[:-1]) == "hello world"
    assert "text" not in stream[0]["choices"][0]
    (submit, *_) = link.of(Submit)
    assert list(unpack(submit.prompt)) == [1, 2, 3]
    assert (submit.sampling.max_tokens, submit.sampling.seed, submit.sampling.min_tokens) == (40, 3, 1)


@in_loop
async def test_without_max_tokens_the_model_bounds_the_text(tokenizer: Tokenizer) -> None:
    """vLLM's SamplingParams have 16 by default, its route has not."""
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer, length=100) as service, client(service) as http:
        for sampling in ({}, {"sampling_params": {}}, {"sampling_params": {"max_tokens": None}}):
            assert (await http.post(GENERATE, json={"token_ids": [1, 2, 3], **sampling})).status_code == 200
    assert [submit.sampling.max_tokens for submit in link.of(Submit)] == [97] * 3


@in_loop
async def test_logprobs_are_vllms(tokenizer: Tokenizer) -> None:
    """The alternatives begin with the token itself and are as many as were asked for, at least one."""
    (token,) = tokenizer.encode("hello")[:1]

    def script(link: FakeLink, submit: Submit) -> Any:
        first, *rest = saying(tokenizer, "hello")(link, submit)
        tops = submit.sampling.logprobs or 0
        ids = (9, token)[:tops]
        own = TokenLogprob(token, -1.0, ids, (-0.5, -1.0)[:tops])
        if submit.sampling.prompt_logprobs is not None:
            yield from logprob_parts(submit.rid, [TokenLogprob(2, -2.0, (3,), (-0.1,))])
        yield msgspec.structs.replace(first, logprobs=(own,))
        yield rest[-1]

    def choice(answer: Any) -> Any:
        return answer["choices"][0]["logprobs"]["content"][0]

    link = FakeLink(script)
    async with running(link, tokenizer) as service, client(service) as http:

        async def ask(**sampling: Any) -> Any:
            return json_of(await http.post(GENERATE, json={"token_ids": [1, 2], "sampling_params": sampling}))

        none, one, two = await ask(logprobs=0), await ask(logprobs=1), await ask(logprobs=2)
        prompt = (await ask(prompt_logprobs=1, max_tokens=1))["prompt_logprobs"]
    assert choice(none)["rank"] is None
    assert choice(none)["top_logprobs"] == [{"token_id": token, "logprob": -1.0, "rank": None}]
    assert choice(one)["top_logprobs"] == [{"token_id": token, "logprob": -1.0, "rank": None}]
    assert choice(two) == {
        "token_id": token, "logprob": -1.0, "rank": 2,
        "top_logprobs": [
            {"token_id": token, "logprob": -1.0, "rank": 2}, {"token_id": 9, "logprob": -0.5, "rank": 1}
        ],
    }  # fmt: skip
    assert prompt == [
        None,
        {
            "2": {"logprob": -2.0, "rank": None, "decoded_token": tokenizer.piece(2)},
            "3": {"logprob": -0.1, "rank": 1, "decoded_token": tokenizer.piece(3)},
        },
    ]


@pytest.mark.parametrize("place", ["body", "extra_args"])
@in_loop
async def test_a_handoff_is_named_in_the_body_or_in_extra_args(tokenizer: Tokenizer, place: str) -> None:
    """llm-d's sidecar writes it into the body, its coordinator into sampling_params.extra_args."""

    def named(params: dict[str, Any], **sampling: Any) -> dict[str, Any]:
        if place == "body":
            return {"token_ids": [5, 6], "sampling_params": sampling, "kv_transfer_params": params}
        return {"token_ids": [5, 6], "sampling_params": {**sampling, "extra_args": {"kv_transfer_params": params}}}

    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post(GENERATE, json=named(NIXL, max_tokens=1, min_tokens=1)))
        refused = await http.post(GENERATE, json=named({**NIXL, "transfer_id": "theirs"}, temperature=9))
        without = await http.post(GENERATE, json={"token_ids": [5, 6]})
    params = answer["kv_transfer_params"]
    (submit,) = link.of(Submit)
    assert (submit.route, params["prompt_token_ids"]) == (SendTo(params["ticket"], hold=True), [5, 6])
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (refused.status_code, json_of(refused)["error"]["param"]) == (400, "sampling_params.temperature")
    assert [message.ticket for message in link.of(RefuseTicket)] == ["theirs"], "its decode peer need not wait"
    assert (without.status_code, json_of(without)["error"]["code"]) == (404, "wrong_role")


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 70000]}, "token_ids[1]"),
        ({"token_ids": [-1]}, "token_ids[0]"),
        ({"features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}, "features"),
        ({"output_mode": "words"}, "output_mode"),
        ({"request_id": "x" * 200}, "request_id"),
        ({"ec_transfer_params": {"a": 1}}, "ec_transfer_params"),
        ({"sampling_params": {"bad_words": ["a"]}}, "sampling_params.bad_words"),
        ({"sampling_params": {"logprobs": -1}}, "sampling_params.logprobs"),
        ({"sampling_params": {"allowed_token_ids": [1]}}, "sampling_params.allowed_token_ids"),
        ({"sampling_params": {"min_tokens": 5, "max_tokens": 2}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"stop_token_ids": [70000]}}, "sampling_params.stop_token_ids[0]"),
        ({"sampling_params": {"structured_outputs": {"choice": []}}}, "sampling_params.structured_outputs.choice"),
        ({"sampling_params": {"structured_outputs": {}}}, "sampling_params.structured_outputs"),
        ({"sampling_params": {"extra_args": {"own": 1}}}, "sampling_params.extra_args.own"),
        ({"sampling_params": {"max_token": 1}}, "sampling_params.max_token"),
    ],
)
@in_loop
async def test_what_is_refused_is_named(tokenizer: Tokenizer, more: dict[str, Any], field: str) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.post(GENERATE, json={"token_ids": [5], **more})
    assert (response.status_code, json_of(response)["error"]["param"]) == (400, field), response.text


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello world"}),
    ("/v1/completions", {"prompt": [7, 8], "max_tokens": 3, "logprobs": 2}),
    ("/v1/chat/completions", CHAT),
    (
        "/v1/chat/completions",
        {
            **CHAT, "max_completion_tokens": 7, "n": 2, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1,
            "seed": 5, "stop": ["wor"], "stop_token_ids": [9], "min_tokens": 2, "presence_penalty": 0.5,
            "frequency_penalty": 0.25, "repetition_penalty": 1.5, "logit_bias": {"5": 2.0}, "logprobs": True,
            "top_logprobs": 1, "include_stop_str_in_output": True, "priority": 3, "cache_salt": "s", "extra_key": "k",
            "deadline_s": 9.0, "slo_ttft_ms": 100.0, "data_parallel_rank": 0,
        },
    ),
    ("/v1/chat/completions", {**CHAT, "ignore_eos": True, "prompt_logprobs": 1}),
    ("/v1/chat/completions", {**CHAT, "structured_outputs": {"choice": ["ab", "c"]}}),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "top_p": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), ASKED)
@in_loop
async def test_what_is_rendered_does_what_the_route_does(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    """The scheduler gets the same of both, and the texts are the same."""
    link = FakeLink(saying(tokenizer, "hello world"))
    async with running(link, tokenizer, length=200) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        direct = json_of(await http.post(path, json=body))
        wanted = [msgspec.structs.replace(submit, rid="") for submit in link.of(Submit)]
        link.sent.clear()
        rendered = json_of(await http.post(f"{path}/render", json=body))
        assert not link.of(Submit), "nothing is computed"
        (ids,) = rendered if isinstance(rendered, list) else [rendered]
        given = json_of(await http.post(GENERATE, json={**ids, "output_mode": "text"}))
        found = [msgspec.structs.replace(submit, rid="") for submit in link.of(Submit)]
    assert isinstance(rendered, list) == (path == "/v1/completions")
    assert found == wanted
    texts = [each.get("text") or each["message"]["content"] for each in direct["choices"]]
    assert [each["text"] for each in given["choices"]] == texts
    assert given["usage"] == direct["usage"]


@in_loop
async def test_several_prompts_are_rendered_one_by_one(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, role="prefill") as service, client(service) as http:
        rendered = json_of(await http.post("/v1/completions/render", json={"prompt": ["ab", "cd"], "stream": True}))
        refused = {
            field: await http.post("/v1/completions/render", json={"prompt": "a", **more})
            for field, more in {
                "echo": {"echo": True},
                "best_of": {"best_of": 2},
                "kv_transfer_params": {"kv_transfer_params": NIXL},
            }.items()
        }
    assert [each["token_ids"] for each in rendered] == [tokenizer.encode("ab"), tokenizer.encode("cd")]
    assert len({each["request_id"] for each in rendered}) == 2
    assert all(each["stream"] for each in rendered)
    for field, response in refused.items():
        assert (response.status_code, json_of(response)["error"]["param"]) == (400, field)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@in_loop
async def test_token_ids_come_with_texts_where_they_are_asked_for(tokenizer: Tokenizer, path: str) -> None:
    """Those of the prompt are in the choice of a completion, and in the response of a chat; a stream has all of them,
    too, in chunks that are as many as there are without."""
    is_chat = path.endswith("chat/completions")
    ids = tokenizer.encode("hello world<eos>")
    body: dict[str, Any] = {**(CHAT if is_chat else {"prompt": ["ab", "cd"]}), "n": 2, "return_token_ids": True}
    link = FakeLink(saying(tokenizer, "hello world<eos>", "stop"))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post(path, json=body))
        prompts = [list(unpack(submit.prompt)) for submit in link.of(Submit)]
        stream = events(await http.post(path, json={**body, "stream": True}))
        plain = json_of(await http.post(path, json={**body, "return_token_ids": False}))
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids] * len(prompts)
    assert answer["usage"]["completion_tokens"] == len(ids) * len(prompts)
    if is_chat:
        assert answer["prompt_token_ids"] == prompts[0]
        assert next(chunk["prompt_token_ids"] for chunk in stream) == prompts[0]
    else:
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == prompts
    for index, prompt in enumerate(prompts):
        chunks = [choice for chunk in stream for choice in chunk["choices"] if choice["index"] == index]
        assert [token for chunk in chunks for token in chunk["token_ids"]] == ids
        assert is_chat or [chunk.get("prompt_token_ids") for chunk in chunks][:2] == [prompt, None]
    assert b"token_ids" not in msgspec.json.encode(plain)


@in_loop
async def test_a_decode_server_fetches_what_a_sidecar_names(tokenizer: Tokenizer) -> None:
    """The params of the prefill server's answer, as they came, in the body of the same prompt."""
    params = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_host": "10.0.0.9", "remote_port": 1,
        "remote_request_id": "t", "ticket": "t", "remote_block_ids": [[0]], "prompt_token_ids": [5, 6],
    }  # fmt: skip
    link = FakeLink()
    more = {"prefill": ("http://127.0.0.1:9",)}
    async with running(link, tokenizer, role="decode", **more) as service, client(service) as http:
        answer = json_of(await http.post(GENERATE, json={"token_ids": [5, 6], "kv_transfer_params": params}))
    assert not [each for each in link.of(Submit) if isinstance(each.route, FetchFrom)]
    assert answer["error"]["code"] == "prefill_not_allowed", "an address that no flag covers"
