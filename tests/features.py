"""A case for every field that is served: a value of it, and what has to be beside it in the body to matter.

tests/server/api/test_features.py runs them through the API and the official SDK, tests/routers/test_features.py behind
the routers; a served field without a case fails there.
"""

from typing import Any, NamedTuple

import msgspec

from headrace.core.types.requests.resume import Resume
from headrace.server.api.request import schema

Body = dict[str, Any]
Kind = type[msgspec.Struct]


class Case(NamedTuple):
    """A value that shows."""

    value: Any
    beside: Body = {}  # noqa: RUF012 - never written to
    """Of the body without the field, too; it may have another value of the field there."""
    role: str = "colocated"
    status: int = 200
    """Another one where a value is served in one way only, and the field is read nevertheless."""


RETAIN = {"action_id": "a1", "action_type": "retain", "action_version": "1", "payload": {"seconds": 60}}
HINTS = {"protocol_version": "1", "message_id": "m1", "actions": [RETAIN]}


ROUTES: dict[Kind, tuple[str, Body]] = {
    schema.CompletionBody: ("/v1/completions", {"prompt": "hello"}),
    schema.ChatBody: ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    schema.ResponsesBody: ("/v1/responses", {"input": "hello"}),
    schema.GenerateBody: ("/generate", {"text": "hello"}),
    schema.PrefillBody: ("/v1/prefill", {"prompt": "hello", "ticket": "t"}),
    schema.TokensBody: ("/inference/v1/generate", {"token_ids": [5, 6]}),
    schema.ScoreBody: ("/v1/score", {"query": [5, 6], "items": [[7], [8]], "label_token_ids": [9, 10]}),
    schema.GenerativeScoringBody: (
        "/generative_scoring",
        {"query": "hello", "items": [[7], [8]], "label_token_ids": [9, 10]},
    ),
    schema.RerankBody: ("/v1/rerank", {"query": "hello", "documents": ["a", "b"], "label_token_ids": [9, 10]}),
    schema.TokenizeBody: ("/tokenize", {"prompt": "hello"}),
    schema.DetokenizeBody: ("/detokenize", {"tokens": [5]}),
    schema.KvHintsBody: ("/v1/kv_hints", {"prompt": "hello", "kv_hints": HINTS}),
}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
MESSAGES: dict[str, Any] = {"prompt": None, "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": WEATHER}
CLOCK = {"type": "function", "function": {"name": "clock"}}
PLAIN_TOOL = {"type": "function", **WEATHER}  # of /v1/responses
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
MESSAGE = {"role": "user", "content": "hello"}
PARIS = '{"city": "Paris"}'
OBJECT = {"type": "object"}
GRAMMAR = 'root ::= "a"'
NIXL = {"do_remote_decode": True, "do_remote_prefill": False}
HOST = {"bootstrap_host": "127.0.0.1"}
ANY_ROUTE = {
    "temperature": Case(0.5),
    "top_k": Case(5),
    "top_p": Case(0.5),
    "min_p": Case(0.1),
    "seed": Case(7),
    "presence_penalty": Case(0.5),
    "frequency_penalty": Case(0.5),
    "repetition_penalty": Case(1.5),
    "logit_bias": Case({"5": 2.0}),
    "max_tokens": Case(1),
    "min_tokens": Case(1),
    "stop": Case("wor"),
    "stop_token_ids": Case([5]),
    "ignore_eos": Case(True),
    "prompt_logprobs": Case(1),
    "prompt_logprobs_start": Case(1, {"prompt_logprobs": 1}),
    "priority": Case(3),
    "slo_ttft_ms": Case(5000.0),
    "deadline_s": Case(9.0),
    "data_parallel_rank": Case(0),
    "cache_salt": Case("salt"),
    "extra_key": Case("key"),
    "kv_hints": Case(HINTS),
    "prompt_cache_retention": Case("24h"),
    "session_id": Case("s1"),
    "prompt_cache_key": Case("s1"),
    "structured_outputs": Case({"regex": "a+"}),
    "guided_json": Case(OBJECT),
    "guided_regex": Case("a+"),
    "guided_choice": Case(["a"]),
    "guided_grammar": Case(GRAMMAR),
    "model": Case("another", status=404),
    "stream": Case(True),
    "n": Case(2),
    "stream_options": Case({"include_usage": True}, {"stream": True}),
    "response_format": Case({"type": "json_object"}),
    "json_schema": Case(OBJECT),
    "regex": Case("a+"),
    "ebnf": Case(GRAMMAR),
    "include_stop_str_in_output": Case(True, {"stop": "wor"}),
    "no_stop_trim": Case(True, {"stop": "wor"}),
    "kv_transfer_params": Case(NIXL, role="prefill"),
    "bootstrap_room": Case(7, HOST, role="prefill"),
    "bootstrap_host": Case("2.2.2.2", {"bootstrap_room": 7}, role="prefill"),
    "bootstrap_port": Case(70000, {**HOST, "bootstrap_room": 7}, role="decode", status=400),
}
OF_ROUTE: dict[Kind, dict[str, Case]] = {
    schema.CompletionBody: {
        "prompt": Case("another"),
        "logprobs": Case(1),
        "headrace": Case({"open": True}),
        "echo": Case(True),
        "best_of": Case(3, {"max_tokens": 2}),
        "max_completion_tokens": Case(1),
        "return_token_ids": Case(True),
    },
    schema.ChatBody: {
        "messages": Case([{"role": "user", "content": "another"}]),
        "headrace": Case({"open": True}),
        "chat_template_kwargs": Case({"enable_thinking": False}),
        "reasoning_effort": Case("low"),
        "add_generation_prompt": Case(False),
        "continue_final_message": Case(True),
        "include_reasoning": Case(False),
        "separate_reasoning": Case(False),
        "return_token_ids": Case(True),
        "logprobs": Case(True),
        "top_logprobs": Case(2, {"logprobs": True}),
        "max_completion_tokens": Case(1),
        "tools": Case([TOOL]),
        "tool_choice": Case("required", {"tools": [TOOL]}),
        "parallel_tool_calls": Case(False, {"tools": [TOOL], "tool_choice": "required"}),
    },
    schema.ResponsesBody: {
        "input": Case("another"),
        "instructions": Case("Be brief."),
        "reasoning": Case({"effort": "low"}),
        "max_output_tokens": Case(1),
        "text": Case({"format": {"type": "json_object"}}),
        "n": Case(2, status=400),
        "stream_options": Case({"include_progress": True}, {"stream": True}, status=400),  # usage comes anyway
        "tools": Case([PLAIN_TOOL]),
        "tool_choice": Case("required", {"tools": [PLAIN_TOOL]}),
        "parallel_tool_calls": Case(False, {"tools": [PLAIN_TOOL], "tool_choice": "required"}),
    },
    schema.GenerateBody: {
        "text": Case("another"),
        "input_ids": Case([5, 6], {"text": None}),
        "sampling_params": Case({"temperature": 0.5}),
        "return_logprob": Case(True),
        "logprob_start_len": Case(0, {"return_logprob": True}),
        "top_logprobs_num": Case(2, {"return_logprob": True}),
        "rid": Case("mine"),
        "return_hidden_states": Case(True),
        "incremental_streaming_output": Case(True, {"stream": True}),
    },
    schema.PrefillBody: {
        "prompt": Case("another"),
        "prompt_token_ids": Case([5, 6], {"prompt": None}),
        "images": Case(["data:,"], {"prompt": None, "prompt_token_ids": [5]}, status=400),  # this model takes none
        "messages": Case([{"role": "user", "content": "another"}], {"prompt": None}),
        "chat_template_kwargs": Case({"enable_thinking": False}, MESSAGES),
        "reasoning_effort": Case("low", MESSAGES),
        "add_generation_prompt": Case(False, MESSAGES),
        "continue_final_message": Case(True, MESSAGES),
        "logprobs": Case(1),
        "stop": Case("\x07"),
        "ticket": Case("another"),
        "handoff": Case("hold"),
        "cached_only": Case(True),
        "rid": Case("mine"),
        "hidden_states": Case("last"),
        "draft_top_k": Case(2),
        "adapter": Case("0" * 32, status=404),  # of no adapter, since the model has none
        "resume": Case({"ticket": "t", "control_port": 0, "tokens": 1}, status=400),  # there is no such port
        "open": Case(True),
    },
    schema.TokensBody: {
        "token_ids": Case([7]),
        "sampling_params": Case({"temperature": 0.5}),
        "request_id": Case("mine"),
        "return_token_ids": Case(True),
        "output_mode": Case("text"),
        "reasoning_ended": Case(False, {"sampling_params": {"structured_outputs": {"regex": "a+"}}}, status=400),
    },
    schema.ScoreBody: {
        "query": Case([6]),
        "items": Case([[7]]),
        "label_token_ids": Case([[9], [10]]),
        "apply_softmax": Case(True),
        "temperature": Case(0.5, {"apply_softmax": True}),
        "return_token_logprobs": Case(True),
        "item_first": Case(True),
    },
    schema.GenerativeScoringBody: {
        "query": Case([6]),
        "items": Case(["hello"]),
        "label_token_ids": Case([9]),
        "apply_softmax": Case(False),
        "item_first": Case(True),
        "add_special_tokens": Case(False),
    },
    schema.RerankBody: {
        "query": Case("another"),
        "documents": Case("a"),
        "top_n": Case(1),
        "return_documents": Case(False),
        "instruction": Case("Be kind."),
        "instruct": Case("Be kind."),
        "labels": Case(["a", "b"], {"label_token_ids": None}),
        "label_token_ids": Case([10, 9]),
        "chat_template_kwargs": Case({"enable_thinking": True}),
    },
    schema.TokenizeBody: {
        "prompt": Case("another"),
        "messages": Case([{"role": "user", "content": "another"}], {"prompt": None}),
        "chat_template_kwargs": Case({"enable_thinking": False}, MESSAGES),
        "reasoning_effort": Case("low", MESSAGES),
        "add_generation_prompt": Case(False, MESSAGES),
        "continue_final_message": Case(True, MESSAGES),
        "tools": Case([TOOL], MESSAGES),
    },
    schema.DetokenizeBody: {"tokens": Case([6])},
    schema.KvHintsBody: {
        "kv_hints": Case({**HINTS, "actions": []}),
        "prompt": Case("another"),
        "prompt_token_ids": Case([5, 6], {"prompt": None}),
        "messages": Case([{"role": "user", "content": "another"}], {"prompt": None}),
        "chat_template_kwargs": Case({"enable_thinking": False}, MESSAGES),
        "reasoning_effort": Case("low", MESSAGES),
        "add_generation_prompt": Case(False, MESSAGES),
        "continue_final_message": Case(True, MESSAGES),
        "tools": Case([TOOL], MESSAGES),
    },
}


def cases(kind: Kind) -> dict[str, Case]:
    """Of all fields of a route that have one."""
    served = kind.__struct_fields__
    found = {**ANY_ROUTE, **OF_ROUTE[kind]}
    return {name: found[name] for name in served if name in found}


# Objects within bodies: the route, and the body around an object of this kind.
OBJECTS: dict[Kind, tuple[Kind, Any]] = {
    schema.GenerateSampling: (schema.GenerateBody, lambda found: {"sampling_params": found}),
    schema.TokenSampling: (schema.TokensBody, lambda found: {"sampling_params": found}),
    schema.ExtraArgs: (schema.TokensBody, lambda found: {"sampling_params": {"extra_args": found}}),
    Resume: (schema.PrefillBody, lambda found: {"resume": found}),
    schema.StructuredOutputs: (schema.CompletionBody, lambda found: {"structured_outputs": found}),
    schema.OpenFields: (schema.CompletionBody, lambda found: {"headrace": found}),
    schema.StreamOptions: (schema.CompletionBody, lambda found: {"stream": True, "stream_options": found}),
    schema.ResponseFormat: (schema.ChatBody, lambda found: {"response_format": found}),
    schema.JsonSchemaFormat: (
        schema.ChatBody,
        lambda found: {"response_format": {"type": "json_schema", "json_schema": found}},
    ),
    schema.ReasoningOptions: (schema.ResponsesBody, lambda found: {"reasoning": found}),
    schema.TextOptions: (schema.ResponsesBody, lambda found: {"text": found}),
    schema.TextFormat: (schema.ResponsesBody, lambda found: {"text": {"format": found}}),
    schema.ChatMessage: (schema.ChatBody, lambda found: {"messages": [found]}),
    schema.Part: (schema.ChatBody, lambda found: {"messages": [{"role": "user", "content": [found]}]}),
    schema.ImageUrl: (
        schema.ChatBody,
        lambda found: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": found}]}]},
    ),
    schema.Tool: (schema.ChatBody, lambda found: {"tools": [found]}),
    schema.Function: (schema.ChatBody, lambda found: {"tools": [{"function": found}]}),
    schema.ToolChoice: (schema.ChatBody, lambda found: {"tools": [TOOL, CLOCK], "tool_choice": found}),
    schema.ChosenFunction: (
        schema.ChatBody,
        lambda found: {"tools": [TOOL, CLOCK], "tool_choice": {"function": found}},
    ),
    schema.ToolCall: (
        schema.ChatBody,
        lambda found: {"messages": [{"role": "assistant", "tool_calls": [found]}, RESULT]},
    ),
    schema.CalledFunction: (
        schema.ChatBody,
        lambda found: {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": found}]}]},
    ),
    schema.ResponseTool: (schema.ResponsesBody, lambda found: {"tools": [found]}),
    schema.ResponseToolChoice: (
        schema.ResponsesBody,
        lambda found: {"tools": [PLAIN_TOOL, {"type": "function", "name": "clock"}], "tool_choice": found},
    ),
    schema.InputItem: (schema.ResponsesBody, lambda found: {"input": [CALL_ITEM, found]}),
}
FUNCTION = {
    "name": Case("clock", WEATHER),
    "description": Case("Weather of a city", WEATHER),
    "parameters": Case(OBJECT, WEATHER),
    "strict": Case(True, WEATHER),
}
MEMBERS: dict[Kind, dict[str, Case]] = {
    schema.GenerateSampling: {
        **{name: case for name, case in ANY_ROUTE.items() if name in schema.GenerateSampling.__struct_fields__},
        "sampling_seed": Case(7),
        "max_new_tokens": Case(1),
        "min_new_tokens": Case(1),
        "json_schema": Case('{"type": "object"}'),
    },
    schema.TokenSampling: {
        **{name: case for name, case in ANY_ROUTE.items() if name in schema.TokenSampling.__struct_fields__},
        "logprobs": Case(1),
        "include_stop_str_in_output": Case(True, {"stop": "wor"}),
        "extra_args": Case({"kv_transfer_params": NIXL}, role="prefill"),
    },
    schema.ExtraArgs: {"kv_transfer_params": Case(NIXL, role="prefill")},
    Resume: {  # another text of the refusal each, as all three are needed
        "ticket": Case("t", status=400),
        "control_port": Case(5, {"ticket": "t"}, status=400),
        "tokens": Case(0, {"ticket": "t", "control_port": 5}, status=400),
    },
    schema.StructuredOutputs: {
        "json": Case(OBJECT),
        "regex": Case("a+"),
        "choice": Case(["a"]),
        "grammar": Case(GRAMMAR),
        "json_object": Case(True),
    },
    schema.OpenFields: {
        "open": Case(True),
        "open_id": Case("open-x", status=404),
    },
    schema.StreamOptions: {"include_usage": Case(True), "include_progress": Case(True)},
    schema.ResponseFormat: {
        "type": Case("json_object"),
        "json_schema": Case({"schema": OBJECT}, {"type": "json_schema"}),
    },
    schema.JsonSchemaFormat: {"schema": Case({"type": "array"})},
    schema.ReasoningOptions: {"effort": Case("low")},
    schema.TextOptions: {"format": Case({"type": "json_object"})},
    schema.TextFormat: {"type": Case("json_object"), "schema": Case(OBJECT, {"type": "json_schema"})},
    schema.ChatMessage: {
        "content": Case("another", {"role": "user"}),
        "role": Case("assistant", {"content": "hello"}),
        "name": Case("anna", {"role": "user", "content": "hello"}),
        "tool_calls": Case([CALL], {"role": "assistant"}),
        "tool_call_id": Case("c1", {"role": "tool", "content": "rain"}, status=400),  # there is no such call
        "refusal": Case("I will not", {"role": "assistant"}),
        "reasoning_content": Case("well", {"role": "assistant", "content": "hello"}),
        "reasoning": Case("well", {"role": "assistant", "content": "hello"}),
    },
    schema.ImageUrl: {"url": Case("data:,", status=400)},  # this model takes none
    schema.Part: {
        "type": Case("image_url", {"text": "x"}, status=400),
        "image_url": Case({"url": "data:,"}, {"type": "image_url"}, status=400),
        "text": Case("another", {"type": "text"}),
        "refusal": Case("I will not", {"type": "refusal"}),
    },
    schema.Tool: {
        "function": Case({"name": "clock"}, TOOL),
        "type": Case("custom", TOOL, status=400),
    },
    schema.Function: FUNCTION,
    schema.ToolChoice: {
        "function": Case({"name": "clock"}, {"function": {"name": "weather"}}),
        "type": Case("custom", {"function": {"name": "weather"}}, status=400),
    },
    schema.ChosenFunction: {"name": Case("clock", {"name": "weather"})},
    schema.ToolCall: {
        "id": Case("c2", CALL, status=400),  # the result is of another call
        "function": Case({"name": "clock"}, CALL),
        "type": Case("custom", CALL, status=400),
    },
    schema.CalledFunction: {
        "name": Case("clock", {"name": "weather"}),
        "arguments": Case(PARIS, {"name": "weather"}),
    },
    schema.ResponseTool: {
        **{name: Case(case.value, {"type": "function"} | case.beside) for name, case in FUNCTION.items()},
        "type": Case("custom", PLAIN_TOOL, status=400),
    },
    schema.ResponseToolChoice: {
        "type": Case("custom", {"type": "function", "name": "weather"}, status=400),
        "name": Case("clock", {"type": "function", "name": "weather"}),
    },
    schema.InputItem: {
        "role": Case("assistant", MESSAGE),
        "content": Case("another", MESSAGE),
        "name": Case("anna", MESSAGE),
        "call_id": Case("c2", RESULT_ITEM, status=400),  # there is no such call
        "arguments": Case(PARIS, CALL_ITEM),
        "output": Case("sun", RESULT_ITEM),
        "type": Case("function_call", MESSAGE, status=400),
    },
}
