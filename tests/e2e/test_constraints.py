"""Structured output on a pair: what is generated matches the constraint, and refusals are refused before admission."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import jsonschema
import pytest

from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until
from tests.e2e.schemas import check_texts, random_schema

MODEL = ("--model", "stub:layers=2,hidden=16,us_per_token=0,vocab=300", "--max-model-len", "4000",
         "--served-model-name", "tested")  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with pair((*MODEL, "--page-size", "16"), (*MODEL, "--page-size", "4")) as both:
        yield both


def completed(server: Server, body: dict[str, Any], prompt: str = "say") -> str:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 900, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["text"])


@pytest.mark.parametrize("seed", range(3))
def test_a_json_schema_is_kept_to(servers: tuple[Server, Server], seed: int) -> None:
    text = completed(servers[1], {"structured_outputs": {"json": PERSON}, "seed": seed})
    jsonschema.validate(json.loads(text), PERSON)


def test_penalties_count_the_first_token_of_the_prefill_server(servers: tuple[Server, Server]) -> None:
    """The stub's own token has a logit of 40, and x of 45, 43, 41 and 39."""
    body = {"temperature": 0, "logit_bias": {str(ord("x")): 45}, "frequency_penalty": 2, "max_tokens": 6}
    answer = servers[1].post("/v1/completions", {"prompt": "say", **body})
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["text"]
    assert text[:3] == "xxx"
    assert "x" not in text[3:]


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"choice": ["London", "Paris"]}}, "London|Paris"),
        ({"guided_choice": ["London", "Paris"]}, "London|Paris"),
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2,4}"}}, "[a-f]{3}-[0-9]{2,4}"),
        ({"guided_regex": "x|yy|zzz"}, "x|yy|zzz"),
        ({"regex": "x|yy|zzz"}, "x|yy|zzz"),
        ({"ebnf": 'root ::= "x" | "yy"'}, "x|yy"),
        ({"json_schema": {"enum": [7, 8]}}, "7|8"),
        ({"structured_outputs": {"grammar": 'root ::= ("ab" | "cd") [0-9]'}}, "(ab|cd)[0-9]"),
        ({"guided_grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"structured_outputs": {"choice": ['"\n', "ä"]}}, '"\n|ä'),
    ],
)
def test_choices_expressions_and_grammars_are_kept_to(
    servers: tuple[Server, Server], body: dict[str, Any], pattern: str
) -> None:
    for seed in range(2):
        assert re.fullmatch(pattern, completed(servers[1], {**body, "seed": seed}))


def test_every_api_has_its_field(servers: tuple[Server, Server]) -> None:
    decode, messages = servers[1], [{"role": "user", "content": "say"}]
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    chat = decode.post("/v1/chat/completions", {"messages": messages, "max_tokens": 900, "response_format": form})
    jsonschema.validate(json.loads(chat.json()["choices"][0]["message"]["content"]), PERSON)
    form = {"type": "json_schema", "name": "person", "schema": PERSON}
    response = decode.post("/v1/responses", {"input": "say", "max_output_tokens": 900, "text": {"format": form}})
    jsonschema.validate(json.loads(response.json()["output"][0]["content"][0]["text"]), PERSON)
    for constraint, pattern in (
        ({"json_schema": json.dumps({"enum": [1, 2]})}, "1|2"),
        ({"regex": "a{3}"}, "aaa"),
        ({"ebnf": 'root ::= "b" | "c"'}, "b|c"),
    ):
        body = {"text": "say", "sampling_params": {"max_new_tokens": 100, **constraint}}
        assert re.fullmatch(pattern, decode.post("/generate", body).json()["text"])


def routed(prefill: Server, decode: Server, prefill_body: dict[str, Any], body: dict[str, Any]) -> tuple[Any, Any]:
    """The answers of both servers as a router of vLLM asks them: the prompt is computed, then fetched."""
    asked = {"prompt": "say", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **prefill_body}
    first = prefill.post("/v1/completions", asked).json()
    body = {"prompt": "say", "max_tokens": 50, "kv_transfer_params": first["kv_transfer_params"], **body}
    return first, decode.post("/v1/completions", body)


def test_the_first_token_is_masked_by_the_prefill_server(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    body = {"prompt": "say", "handoff": "none", "structured_outputs": {"regex": "[xy]z"}}
    assert prefill.post("/v1/prefill", body).json()["first_token"]["text"] in ("x", "y")
    assert prefill.get("/v1/handoff").json()["structured_outputs"] is True
    constraint = {"guided_regex": "[xy]{2}z"}
    first, second = routed(prefill, decode, constraint, constraint)
    assert first["choices"][0]["text"] in ("x", "y")
    assert len(first["kv_transfer_params"]["grammar"]) == 32
    assert re.fullmatch("[xy]{2}z", second.json()["choices"][0]["text"])


def test_a_first_token_that_was_not_masked_fails_its_request(servers: tuple[Server, Server]) -> None:
    _, answer = routed(*servers, {"stop_token_ids": []}, {"guided_regex": "[xy]{3}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "grammar_rejected")
    for server in servers:
        wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages are free")


def test_min_tokens_gives_way_to_the_end_of_a_grammar(servers: tuple[Server, Server]) -> None:
    text = completed(servers[1], {"structured_outputs": {"regex": "a{2,9}"}, "min_tokens": 5})
    assert re.fullmatch("a{4,9}", text)  # the end is no token of the text
    assert completed(servers[1], {"structured_outputs": {"regex": "aa"}, "min_tokens": 20}) == "aa"


def test_logprobs_are_of_what_is_allowed(servers: tuple[Server, Server]) -> None:
    body = {"prompt": "say", "max_tokens": 9, "logprobs": 1, "structured_outputs": {"regex": "xyz"}}
    found = servers[1].post("/v1/completions", body).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["x", "y", "z", "<end>"]
    assert found["token_logprobs"] == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {"json": {"type": "klingon"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": {"type": "string", "pattern": "((a{1000}){1000}){1000}"}}, "guided_json"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(servers: tuple[Server, Server], body: dict[str, Any], field: str) -> None:
    for server in servers:
        answer = server.post("/v1/completions", {"prompt": "say", **body})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == field


def test_a_cancelled_request_leaves_nothing(servers: tuple[Server, Server]) -> None:
    body = {"prompt": "say", "max_tokens": 3000, "structured_outputs": {"regex": "a*"}, "deadline_s": 0.05}
    servers[1].post("/v1/completions", body)
    for server in servers:
        wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages are free")
    assert completed(servers[1], {"structured_outputs": {"regex": "b"}}) == "b"


@pytest.mark.full
def test_stages_shards_and_preempted_requests_keep_to_it() -> None:
    model = "stub:layers=4,hidden=16,heads=2,kv_heads=2,us_per_token=0,vocab=300"
    room = ("--max-model-len", "280", "--page-size", "4", "--kv-pages", "150")
    with serving("--model", model, *room, "--pp", "2", "--tp", "2") as server, ThreadPoolExecutor(5) as executor:
        pattern = "[a-c]{200}|[xy]{220}z"
        body = {"structured_outputs": {"regex": pattern}, "max_tokens": 250}
        for text in executor.map(lambda seed: completed(server, {**body, "seed": seed}), range(5)):
            assert re.fullmatch(pattern, text)
        assert server.metrics()["headrace_preemptions_total"] > 0
        wait_until(lambda: pages_in_use(server) == 0, 10, "pages are free")


def test_choices_and_streams_keep_to_it(servers: tuple[Server, Server]) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 20, "guided_regex": "[xy]{4}"}
    choices = servers[1].post("/v1/completions", body).json()["choices"]
    assert all(re.fullmatch("[xy]{4}", choice["text"]) for choice in choices)
    assert len(choices) == 4
    lines = servers[1].post("/v1/completions", {**body, "prompt": "a", "n": 1, "stream": True}).text.splitlines()
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert re.fullmatch("[xy]{4}", "".join(choice["text"] for part in parts for choice in part["choices"]))


def test_texts_of_random_schemas(servers: tuple[Server, Server]) -> None:
    check_texts(servers[1].post, range(20), at_a_time=4)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [("16", "4"), ("64", "16")])
def test_texts_of_a_thousand_random_schemas(sizes: tuple[str, str]) -> None:
    flags = [(*MODEL, "--page-size", size) for size in sizes]
    with pair(*flags) as (prefill, decode):
        check_texts(decode.post, range(1000), at_a_time=8)
        for server in (prefill, decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 10, "pages are free")


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_calls_that_have_to_be_made_match_the_schema_of_their_function(
    servers: tuple[Server, Server], seed: int
) -> None:
    """Whole and streamed; the chat template of the stub model has tools."""
    functions = {f"f{number}": random_schema(Random(10 * seed + number)) for number in range(3)}
    functions = {name: each if each.get("type") == "object" else PERSON for name, each in functions.items()}
    tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in functions.items()]
    body = {"messages": [{"role": "user", "content": "go"}], "tools": tools, "max_tokens": 3000, "seed": seed}
    for choice in ("required", {"type": "function", "function": {"name": "f1"}}):
        asked = {**body, "tool_choice": choice, "parallel_tool_calls": False}
        answer = servers[1].post("/v1/chat/completions", asked).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert (answer["finish_reason"], answer["message"]["content"]) == ("tool_calls", None)
        jsonschema.validate(json.loads(call["function"]["arguments"]), functions[call["function"]["name"]])
        assert choice == "required" or call["function"]["name"] == "f1"
        lines = servers[1].post("/v1/chat/completions", {**asked, "stream": True}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
        parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part["arguments"] for part in parts) == call["function"]["arguments"]
