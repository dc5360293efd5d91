"""POST /generate of SGLang's API."""

from typing import Any

import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import Discard, SendTo, TokenLogprob
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_handoff import NIXL, computing
from tests.server.fakes import (
    FakeLink,
    client,
    in_loop,
    json_of,
    logprob_parts,
    made_up_logprob,
    running,
    saying,
    ticket_of,
)


@in_loop
async def test_one_prompt(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello world", cached=1))
    async with running(link, tokenizer) as service, client(service) as http:
        fields = {
            "max_new_tokens": 9,
            "min_new_tokens": 1,
            "temperature": 0,
            "top_k": 5,
            "sampling_seed": 3,
            "stop": "z",
        }
        answer = json_of(await http.post("/generate", json={"text": "hi!", "sampling_params": fields, "rid": "mine"}))
    ids = tokenizer.encode("hello world")
    about = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == ("hello world", ids)
    assert about["finish_reason"] == {"type": "length", "length": len(ids)}
    assert (about["prompt_tokens"], about["completion_tokens"], about["cached_tokens"]) == (3, len(ids), 1)
    assert about["id"].startswith("mine-")
    sampling = link.of(Submit)[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 1, 0)
    assert (sampling.top_k, sampling.seed, sampling.logprobs) == (5, 3, None)


@pytest.mark.parametrize(
    ("prompt", "prompts", "several"),
    [
        ({"text": "ab"}, 1, False),
        ({"input_ids": [1, 2]}, 1, False),
        ({"text": ["ab"]}, 1, True),
        ({"input_ids": [[1, 2], [3]]}, 2, True),
    ],
)
@in_loop
async def test_prompts_in_all_forms(tokenizer: Tokenizer, prompt: dict[str, Any], prompts: int, several: bool) -> None:
    for n in (1, 2):
        link = FakeLink(saying(tokenizer, "hello"))
        async with running(link, tokenizer) as service, client(service) as http:
            answer = json_of(await http.post("/generate", json={**prompt, "sampling_params": {"n": n}}))
        assert isinstance(answer, list) == (several or n > 1)
        assert len(link.of(Submit)) == prompts * n
        texts = [one["text"] for one in answer] if isinstance(answer, list) else [answer["text"]]
        assert texts == ["hello"] * (prompts * n)
    if "input_ids" in prompt and several:
        assert [list(unpack(submit.prompt)) for submit in link.of(Submit)] == [[1, 2], [1, 2], [3], [3]]


SALTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"text": "ab", "cache_salt": "s"}, ["s"]),
    ({"text": ["ab", "cd"], "cache_salt": "s"}, ["s", "s"]),
    ({"text": ["ab", "cd"], "cache_salt": ["s", "t"]}, ["s", "t"]),
    ({"input_ids": [[1], [2]], "cache_salt": ["s", "t"], "sampling_params": {"n": 2}}, ["s", "s", "t", "t"]),
    ({"text": ["ab", "cd"]}, ["", ""]),
]


@pytest.mark.parametrize(("body", "salts"), SALTS)
@in_loop
async def test_every_prompt_has_its_cache_salt(tokenizer: Tokenizer, body: dict[str, Any], salts: list[str]) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        assert (await http.post("/generate", json=body)).status_code == 200
    assert [submit.terms.cache_salt for submit in link.of(Submit)] == salts


@in_loop
async def test_every_prompt_has_its_request_id(tokenizer: Tokenizer) -> None:
    """As routers send them with several prompts, whose logprobs they want as those of one."""
    texts, rids = ["ab", "cde"], ["mine", "yours"]
    asked = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 2}}
    for role, more in (("colocated", {}), ("prefill", {"bootstrap_host": "127.0.0.1", "bootstrap_room": [5, 6]})):
        link = FakeLink(saying(tokenizer, "hello"))
        async with running(link, tokenizer, role=role) as service, client(service) as http:
            body = {"text": texts, "rid": rids, **asked, **more}
            answer = json_of(await http.post("/generate", json=body))
            wrong = json_of(await http.post("/generate", json={**body, "rid": ["mine"]}))
        assert [submit.sampling.prompt_logprobs for submit in link.of(Submit)] == [0] * 4
        ids = [one["meta_info"]["id"] for one in answer]
        assert ids == [submit.rid for submit in link.of(Submit)]
        assert [given.split("-")[0] for given in ids] == ["mine", "mine", "yours", "yours"]
        assert len(set(ids)) == 4
        assert wrong["error"]["param"] == "rid"


@in_loop
async def test_tenants_differ_in_cache_salt_or_extra_key(tokenizer: Tokenizer) -> None:
    """Under every form and on every route, equal pairs share a salt and others do not."""
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    asked: list[dict[str, Any]] = [{"cache_salt": salt, "extra_key": key} for salt, key in pairs]
    lists = {"cache_salt": [salt for salt, _ in pairs], "extra_key": [key for _, key in pairs]}
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        await http.post("/generate", json={"text": ["x"] * len(pairs), **lists})
        for path, prompt in (
            ("/generate", {"text": "x"}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/prefill", {"prompt": "x", "handoff": "none"}),
        ):
            for fields in asked:
                assert (await http.post(path, json={**prompt, **fields})).status_code == 200
    salts = [submit.terms.cache_salt for submit in link.of(Submit)]
    assert salts == salts[: len(pairs)] * 6
    assert len(set(salts)) == len(pairs)
    assert all(len(salt) <= 256 for salt in salts), "a prefill server takes them from a decode server"


@in_loop
async def test_logprobs(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> Any:
        *tokens, end = saying(tokenizer, "hello", reason="stop")(link, submit)
        scored = [TokenLogprob(second, -1.5, (5, 6), (-1.5, -2.0))]
        prompt = scored if submit.sampling.prompt_logprobs is not None and submit.sampling.cacheable(2) < 1 else []
        return [*logprob_parts(submit.rid, prompt), *tokens, end]

    token = tokenizer.encode("hello")[0]
    first_id, second = tokenizer.encode("hi")
    seen = [[None, first_id, None], [-1.5, second, None]]
    tops_seen = [None, [[-1.5, 5, None], [-2.0, 6, None]]]
    none: list[Any] = []
    for start, prompt, prompt_tops in (
        (None, none, none),
        (-1, none, none),
        (0, seen, tops_seen),
        (1, [[None, second, None]], [None]),  # the first one has no logprob, wherever it is, as in SGLang
    ):
        link = FakeLink(script)
        async with running(link, tokenizer) as service, client(service) as http:
            body = {"text": "hi", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": start}
            about = json_of(await http.post("/generate", json=body))["meta_info"]
        first = made_up_logprob(token, 2)
        assert about["output_token_logprobs"] == [[first.logprob, token, None]]
        tops = zip(first.top_logprobs, first.top_ids, strict=True)
        assert about["output_top_logprobs"] == [[[logprob, top, None] for logprob, top in tops]]
        assert (about["input_token_logprobs"], about["input_top_logprobs"]) == (prompt, prompt_tops)
        assert about["finish_reason"]["type"] == "stop"


@in_loop
async def test_an_incremental_stream_has_each_token_once(tokenizer: Tokenizer) -> None:
    """Also the tokens of a character that is not complete yet, and no text twice."""
    said = "hé llo"
    async with running(FakeLink(saying(tokenizer, said)), tokenizer) as service, client(service) as http:
        fields = {"text": "a", "stream": True, "incremental_streaming_output": True, "return_logprob": True}
        text = (await http.post("/generate", json=fields)).text
    *lines, done = text.split("\n\n")[:-1]
    events = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
    assert done == "data: [DONE]"
    assert [id for event in events for id in event["output_ids"]] == tokenizer.encode(said)
    assert "".join(event["text"] for event in events) == said
    told = [token for event in events for _, token, _ in event["meta_info"].get("output_token_logprobs", ())]
    assert told == tokenizer.encode(said)
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert [event["meta_info"]["finish_reason"] is not None for event in events] == [False] * (len(events) - 1) + [True]


@in_loop
async def test_a_stream_repeats_the_text(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(saying(tokenizer, "hello world")), tokenizer) as service, client(service) as http:
        text = (await http.post("/generate", json={"text": ["a", "b"], "stream": True})).text
    lines = text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    events = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
    for index in (0, 1):
        mine = [event for event in events if event["index"] == index]
        assert [event["text"] for event in mine][:2] == ["hello", "hello world"]
        assert [event["meta_info"]["finish_reason"] is None for event in mine][-2:] == [True, False]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["x", ""]}, "text[1]"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [10**6]}, "input_ids[0]"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "x", "sampling_params": {"temperature": 9}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"temperature": "9"}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "x", "sampling_params": {"regex": "a*", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": "x", "sampling_params": {"regex": "a*", "ignore_eos": True}}, "sampling_params.ignore_eos"),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"text": ["x", "y"], "cache_salt": ["s"]}, "cache_salt"),
        ({"text": ["x", "y"], "extra_key": ["s", "t", "u"]}, "extra_key"),
        ({"text": ["x", "y"], "extra_key": ["s", "t" * 257]}, "extra_key[1]"),
        ({"text": "x", "cache_salt": "s" * 257}, "cache_salt"),
        ({"text": "x", "extra_key": 7}, "extra_key"),
        ({"text": "x", "rid": "r" * 129}, "rid"),
        ({"text": "x", "rid": "two\nlines"}, "rid"),
    ],
)
@in_loop
async def test_mistakes_are_named_as_they_were_sent(tokenizer: Tokenizer, body: dict[str, Any], field: str) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        response = await http.post("/generate", json=body)
    assert response.status_code == 400
    error = json_of(response)["error"]
    assert (error["param"], field in error["message"]) == (field, True)


@in_loop
async def test_only_the_response_for_one_prompt_names_held_kv(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        one = json_of(await http.post("/generate", json={"text": "hi", "kv_transfer_params": NIXL}))
        many = json_of(await http.post("/generate", json={"text": ["a", "b"], "kv_transfer_params": NIXL}))
        named = {**NIXL, "transfer_id": "x"}
        await http.post("/generate", json={"text": ["a", "b"], "kv_transfer_params": named})
    assert one["kv_transfer_params"]["ticket"] == ticket_of(link.of(Submit)[0])
    assert len(many) == 2
    assert [submit.route for submit in link.of(Submit)[1:3]] == [Discard()] * 2
    assert [submit.route for submit in link.of(Submit)[3:]] == [SendTo("x/0", hold=True), SendTo("x/1", hold=True)]
