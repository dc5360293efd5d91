"""Requests of Dynamo's frontend as bodies for servers: what is in the body is served, the rest is refused by name."""

import re
from typing import Any

import msgspec
import pytest

from headrace.core.types.errors import HeadraceError
from headrace.gateway.vllm.bodies import GatewayCompletion, require_remote_decode
from headrace.integrations.dynamo.request import (
    BYPASS,
    decode_body,
    gateway_body,
    generate_body,
    prefill_body,
)
from headrace.server.api.request.schema import GenerateBody
from headrace.server.upstream.handoff_params import BatchShape, kv_sinks, kv_sources
from tests.integrations.dynamo.requests import decoding, request

CONTEXT = 100


def read(body: dict[str, Any]) -> GenerateBody:
    """As the server reads it."""
    return msgspec.json.decode(msgspec.json.encode(body), type=GenerateBody)


def sampling(**changes: Any) -> dict[str, Any]:
    found = generate_body(request(**changes), CONTEXT)
    read(found)
    return dict(found["sampling_params"])


def test_a_plain_request() -> None:
    body = generate_body(request(), CONTEXT)
    assert body == {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 8, "stop_token_ids": [256]},
        "data_parallel_rank": 0,
    }
    read(body)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_k": -1}, "top_k", -1),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"min_p": 0.1}, "min_p", 0.1),
        ({"presence_penalty": 1.0}, "presence_penalty", 1.0),
        ({"frequency_penalty": 1.0}, "frequency_penalty", 1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"seed": 7}, "sampling_seed", 7),
        ({"include_stop_str_in_output": True}, "no_stop_trim", True),
        ({"stop": ["."]}, "stop", ["."]),
        ({"min_tokens": 3}, "min_new_tokens", 3),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"max_tokens": None}, "max_new_tokens", CONTEXT - 3),
        ({"stop_token_ids": [9], "stop_token_ids_hidden": [4, 9]}, "stop_token_ids", [4, 9]),
        ({"guided_decoding": {"json": {"type": "object"}, "backend": "x"}}, "json_schema", '{"type": "object"}'),
        ({"guided_decoding": {"json": '{"type": "null"}'}}, "json_schema", '{"type": "null"}'),
        ({"guided_decoding": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_decoding": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    ],
)
def test_options_that_are_served(given: dict[str, Any], name: str, value: Any) -> None:
    assert sampling(**given)[name] == value


def test_a_choice_is_an_expression_that_matches_it_alone() -> None:
    choices = ["yes (a)", "no-b", "a|b", ".", "é\n"]
    pattern = sampling(guided_decoding={"choice": choices})["regex"]
    assert all(re.fullmatch(pattern, each) for each in choices)
    assert not any(re.fullmatch(pattern, wrong) for wrong in ("yes a", "x", "a", "b", "no-bno-b", ""))


def test_options_that_ask_for_nothing_are_left_out() -> None:
    neutral = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "detokenize": False}
    assert sampling(**neutral, skip_special_tokens=True) == sampling()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"n": 2}, "sampling_options.n"),
        ({"best_of": 2}, "sampling_options.best_of"),
        ({"use_beam_search": True}, "sampling_options.use_beam_search"),
        ({"length_penalty": 0.5}, "sampling_options.length_penalty"),
        ({"allowed_token_ids": [1]}, "sampling_options.allowed_token_ids"),
        ({"bad_words_token_ids": [[1]]}, "sampling_options.bad_words_token_ids"),
        ({"max_thinking_tokens": 5}, "stop_conditions.max_thinking_tokens"),
        ({"guided_decoding": {"structural_tag": {}}}, "sampling_options.guided_decoding.structural_tag"),
        (
            {"guided_decoding": {"json": {}, "whitespace_pattern": " "}},
            "sampling_options.guided_decoding.whitespace_pattern",
        ),
        ({"guided_decoding": {"json": {}, "regex": "a"}}, "sampling_options.guided_decoding"),
        ({"guided_decoding": {"regex": "a"}, "require_reasoning": True}, "require_reasoning"),
        ({"multi_modal_data": {"image": ["data:,"]}}, "multi_modal_data"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"encoder_result": {"a": 1}}, "encoder_result"),
        ({"sampling_options": {"invented_tomorrow": 0}}, "sampling_options.invented_tomorrow"),
        ({"output_options": {"invented_tomorrow": True}}, "output_options.invented_tomorrow"),
        ({"stop_conditions": {"invented_tomorrow": 1}}, "stop_conditions.invented_tomorrow"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(given: dict[str, Any], field: str) -> None:
    for make in (prefill_body, decode_body):
        with pytest.raises(HeadraceError) as refused:
            make(request(**given), CONTEXT)
        info = refused.value.info
        assert (info.status, info.field) == (400, field)
        assert field in info.message


def test_logprobs() -> None:
    plain = generate_body(request(logprobs=0), CONTEXT)
    assert (plain["return_logprob"], plain["top_logprobs_num"]) == (True, 0)
    assert "logprob_start_len" not in plain
    asked = request(logprobs=2, prompt_logprobs=5)
    body = prefill_body(asked, CONTEXT)
    assert (body["top_logprobs_num"], body["logprob_start_len"]) == (5, 0)
    assert "logprob_start_len" not in decode_body(asked, CONTEXT), "they are in the prefill worker's answer"


def test_where_and_when_a_prompt_is_computed() -> None:
    """Dynamo computes a higher priority first, Headrace a lower one."""
    routing = {"priority": 7, "priority_jump": 7.0, "dp_rank": 2, "cache_salt": "s"}
    for make in (prefill_body, decode_body):
        body = make(request(routing=routing), CONTEXT)
        found = read(body)
        assert (found.priority, found.data_parallel_rank, found.cache_salt) == (-7, 2, "s")
    named = read(generate_body(request(agent_context={"session_id": "s1", "session_type_id": "a"}), CONTEXT))
    assert named.session_id == "s1"
    bare = generate_body(request(routing=None, extra_args={"nvext": {"cache_salt": "t"}}), CONTEXT)
    assert bare["cache_salt"] == "t"
    assert "priority" not in bare
    assert "data_parallel_rank" not in bare


def test_the_handoff_of_a_prefill_worker() -> None:
    body = read(prefill_body(request(), CONTEXT))
    (sink,) = kv_sinks(body, BatchShape(1, 1), "new") or ()
    assert (sink.ticket, sink.hold) == ("new", True)
    assert not body.stream


def test_the_handoff_of_a_decode_worker() -> None:
    body = read(decode_body(decoding(), CONTEXT))
    (source,) = kv_sources(body, BatchShape(1, 1), 1) or ()
    assert source.address is not None
    assert (source.address.host, source.address.port, source.ticket) == ("10.0.0.1", 5, "t")
    assert (body.stream, body.incremental_streaming_output) == (True, True)


@pytest.mark.parametrize(
    "given",
    [
        request(),
        request(prefill_result=None),
        request(prefill_result={"disaggregated_params": None}),
        decoding(annotations=[BYPASS]),
    ],
)
def test_a_prompt_without_a_handoff_is_the_decode_servers_to_place(given: dict[str, Any]) -> None:
    assert "kv_transfer_params" not in decode_body(given, CONTEXT)


def test_the_body_for_a_gateway() -> None:
    routing = {"priority": 2, "cache_salt": "s", "dp_rank": 0}
    made = gateway_body(request(n=3, routing=routing, agent_context={"session_id": "s1"}))
    body = msgspec.json.decode(msgspec.json.encode(made), type=GatewayCompletion)
    require_remote_decode(body)
    assert (body.token_ids(), body.n, body.priority, body.cache_salt) == ([[5, 6, 7]], 3, -2, "s")
    assert body.session_id == "s1"
    assert body.recompute_reason() is None
    with pytest.raises(HeadraceError):
        gateway_body(request(multi_modal_data={"image": ["data:,"]}))


def test_the_prompt_is_not_longer_than_the_context() -> None:
    """The server refuses it, not this."""
    assert generate_body(request(max_tokens=None), 2)["sampling_params"]["max_new_tokens"] == 1
