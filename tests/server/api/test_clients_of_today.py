"""What clients send today beside what is asked for: labels, hints and earlier answers, that change no prompt or answer.

Each body is what a client's source puts together, with every field that it may have; where that was read is beside it.
What the official SDK's types allow is looked up in them, so that a new version of it shows what has come. The clients
themselves run in tests/clients (make test-clients).
"""

import typing
from typing import Any

import msgspec
import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params, shared_params
from openai.types import responses as response_types
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param

from headrace.core.messages.frontend import Submit
from headrace.core.types import packed
from headrace.server.api.request import schema
from headrace.server.api.request.other_fields import OTHER_FIELDS
from headrace.server.api.request.parse import parse_body
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_fields import refused_with
from tests.server.fakes import FakeLink, client, in_loop, running, saying

Kind = type[msgspec.Struct]
Body = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
FUNCTION = {"name": "shell", "description": "Runs a command", "parameters": SCHEMA}
HINT = {"type": "ephemeral"}
ASKED = "hello"


def said(role: str, text: str, kind: str = "input_text", **more: Any) -> Body:
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **more}


CALL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "done"}

# The client, the route, its body, and the same without what changes nothing.
CLIENTS: dict[str, tuple[Kind, Body, Body]] = {
    # openai/codex: codex-rs/codex-api/src/common.rs (ResponsesApiRequest), codex-rs/protocol/src/models.rs
    "Codex": (
        schema.ResponsesBody,
        {
            "model": "m",
            "instructions": "You are a coding agent.",
            "input": [
                said("developer", "sandbox"),
                said("user", ASKED),
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "AA=="},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
                {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
                said("assistant", "hi", "output_text", phase="final_answer"),
                said("user", "again"),
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "include": ["reasoning.encrypted_content"],
            "service_tier": "auto",
            "prompt_cache_key": "thread",
            "text": {"verbosity": "medium"},
            "client_metadata": {"x-codex-installation-id": "i", "x-codex-turn-metadata": "{}"},
        },
        {
            "model": "m",
            "instructions": "You are a coding agent.",
            "input": [
                said("developer", "sandbox"),
                said("user", ASKED),
                {"type": "reasoning"},
                {"type": "reasoning"},
                {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "done"}]},
                said("assistant", "hi", "output_text"),
                said("user", "again"),
            ],
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "prompt_cache_key": "thread",
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {},
            "text": {},
        },
    ),
    # vercel/ai: packages/openai-compatible/src/chat; Cline uses it
    "Vercel AI SDK, openai-compatible": (
        schema.ChatBody,
        {
            "model": "m",
            "user": "u",
            "messages": [
                {"role": "user", "content": ASKED},
                {
                    "role": "assistant",
                    "content": None,
                    "reasoning_content": "thought",
                    "tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "s"}}}],
                },
                RESULT,
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "shell"}},
            "verbosity": "medium",
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "thought"},
                RESULT,
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "shell"}},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    # vercel/ai: packages/openai/src/responses (baseArgs, OpenAIResponsesInputItem)
    "Vercel AI SDK, openai": (
        schema.ResponsesBody,
        {
            "model": "m",
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "input_text", "text": ASKED, "prompt_cache_breakpoint": {"mode": "explicit"}}],
                },
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "shell",
                    "arguments": "{}",
                    "id": "fc_1",
                    "caller": {"type": "direct"},
                },
                {"type": "function_call_output", "call_id": "c1", "output": "done", "caller": {"type": "direct"}},
                {
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "hi"}],
                    "id": "msg_1",
                    "phase": "commentary",
                },
            ],
            "max_tool_calls": 4,
            "metadata": {"a": "b"},
            "store": False,
            "user": "u",
            "service_tier": "flex",
            "include": ["web_search_call.action.sources", "code_interpreter_call.outputs"],
            "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "explicit"},
            "prompt_cache_retention": "24h",
            "safety_identifier": "s",
            "truncation": "disabled",
            "reasoning": {"effort": "none"},
        },
        {
            "model": "m",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
                {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            ],
            "prompt_cache_key": "k",
            "prompt_cache_retention": "24h",
            "reasoning": {"effort": "none"},
        },
    ),
    # zed-industries/zed: crates/open_ai/src/open_ai.rs
    "Zed": (
        schema.ChatBody,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "thought"},
                RESULT,
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 64,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {
                "type": "function",
                "function": {"name": "shell", "description": None, "parameters": None},
            },
            "parallel_tool_calls": True,
            "prompt_cache_key": "k",
        },
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "thought"},
                RESULT,
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 64,
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "shell"}},
            "parallel_tool_calls": True,
            "prompt_cache_key": "k",
        },
    ),
    # RooCodeInc/Roo-Code: src/api/providers/openai.ts; continuedev/continue: core/llm/openaiTypeConverters.ts
    "Roo Code and Continue": (
        schema.ChatBody,
        {
            "model": "m",
            "temperature": 0,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s", "cache_control": HINT}]},
                {"role": "user", "content": [{"type": "text", "text": ASKED, "cache_control": HINT}]},
                {
                    "role": "assistant",
                    "content": " ",
                    "reasoning": "thought",
                    "reasoning_content": "",
                    "reasoning_details": [{"signature": "s"}],
                },
            ],
            "tools": [],
            "tool_choice": None,
            "parallel_tool_calls": True,
            "prediction": {"type": "content", "content": "a"},
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "model": "m",
            "temperature": 0,
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {"role": "assistant", "content": " ", "reasoning": "thought", "reasoning_content": ""},
            ],
            "tools": [],
            "parallel_tool_calls": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    # BerriAI/litellm: litellm/types/utils.py (Message); openai-python: ParsedChatCompletionMessage. Answers, sent back
    "answers of LiteLLM and of parse()": (
        schema.ChatBody,
        {
            "messages": [
                {"role": "user", "content": ASKED},
                {
                    "role": "assistant",
                    "content": None,
                    "audio": None,
                    "function_call": None,
                    "annotations": [],
                    "parsed": None,
                    "thinking_blocks": [{"type": "thinking", "thinking": "t", "signature": "s"}],
                    "provider_specific_fields": {"refusal": None},
                    "tool_calls": [
                        {
                            **CALL,
                            "index": 0,
                            "provider_specific_fields": None,
                            "function": {"name": "shell", "arguments": "{}", "parsed_arguments": {}},
                        }
                    ],
                },
                {**RESULT, "cache_control": HINT},
            ],
            "tools": [{"type": "function", "function": {**FUNCTION, "cache_control": HINT}, "cache_control": HINT}],
        },
        {
            "messages": [
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                RESULT,
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_what_clients_send_changes_nothing(name: str) -> None:
    kind, sent, plain = CLIENTS[name]
    assert parse_body(msgspec.json.encode(sent), kind) == parse_body(msgspec.json.encode(plain), kind)


REFUSALS: list[tuple[Kind, Body]] = [  # the same fields where they ask for something
    (schema.ResponsesBody, {"include": ["message.output_text.logprobs"]}),
    (schema.ResponsesBody, {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}),
    (schema.ResponsesBody, {"include": [None]}),
    (schema.ChatBody, {"reasoning": {"effort": "low"}}),
    (schema.ResponsesBody, {"text": {"verbosity": "low"}}),
    (schema.ResponsesBody, {"store": True}),
    (schema.ChatBody, {"verbosity": "high"}),
    (schema.ResponsesBody, {"input": [{"type": "function_call", "caller": {"type": "program", "caller_id": "p"}}]}),
    (schema.ResponsesBody, {"input": [{"type": "function_call", "namespace": "n"}]}),
    (schema.ResponsesBody, {"tools": [{"type": "function", "name": "f", "allowed_callers": ["programmatic"]}]}),
]


@pytest.mark.parametrize(("kind", "more"), REFUSALS, ids=lambda each: str(each)[:60] if isinstance(each, dict) else "")
def test_what_would_change_an_answer_is_refused(kind: Kind, more: Body) -> None:
    error = refused_with(kind, {"input": "x"} | more if kind is schema.ResponsesBody else {"messages": []} | more)
    assert error is not None
    assert error.code == "unsupported"


async def prompts(tokenizer: Tokenizer, *bodies: tuple[str, Body]) -> list[str]:
    """What the scheduler is asked to continue for each of these bodies, by path."""
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer, length=1000) as service, client(service) as http:
        for path, body in bodies:
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
    return [tokenizer.decode(packed.unpack(submit.prompt).tolist()) for submit in link.of(Submit)]


@in_loop
async def test_refusals_are_part_of_a_prompt_and_reasoning_where_the_template_says_so(tokenizer: Tokenizer) -> None:
    path = "/v1/responses"
    first, last = said("user", "hello"), said("user", "world")
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no!"}]}
    spoken = {"role": "assistant", "content": "no!"}
    chat = {"role": "user", "content": "hello"}
    found = await prompts(
        tokenizer,
        (path, {"input": [first, thought, refusal, last]}),
        (path, {"input": [first, spoken, last]}),
        ("/v1/chat/completions", {"messages": [chat, {"role": "assistant", "refusal": "no!", "content": None}]}),
        (
            "/v1/chat/completions",
            {"messages": [chat, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no!"}]}]},
        ),
        ("/v1/chat/completions", {"messages": [chat, spoken]}),
    )
    assert "no!" in found[0]
    assert found[0] == found[1]
    assert found[2] == found[3] == found[4]


def names(kind: Any) -> set[str]:
    """Fields of a TypedDict, those that it inherits included."""
    return {name for each in (kind, *kind.__orig_bases__) for name in getattr(each, "__annotations__", {})}


OFFICIAL: list[tuple[Any, Kind]] = [
    (completion_create_params.CompletionCreateParamsBase, schema.CompletionBody),
    (chat_params.CompletionCreateParamsBase, schema.ChatBody),
    (response_create_params.ResponseCreateParamsBase, schema.ResponsesBody),
    (chat_types.ChatCompletionStreamOptionsParam, schema.StreamOptions),
    (response_create_params.StreamOptions, schema.StreamOptions),
    (chat_types.ChatCompletionDeveloperMessageParam, schema.ChatMessage),
    (chat_types.ChatCompletionSystemMessageParam, schema.ChatMessage),
    (chat_types.ChatCompletionUserMessageParam, schema.ChatMessage),
    (chat_types.ChatCompletionAssistantMessageParam, schema.ChatMessage),
    (chat_types.ChatCompletionToolMessageParam, schema.ChatMessage),
    (chat_types.ChatCompletionContentPartTextParam, schema.Part),
    (chat_types.ChatCompletionContentPartRefusalParam, schema.Part),
    (chat_types.ChatCompletionMessageFunctionToolCallParam, schema.ToolCall),
    (chat_types.ChatCompletionFunctionToolParam, schema.Tool),
    (shared_params.FunctionDefinition, schema.Function),
    (chat_types.ChatCompletionNamedToolChoiceParam, schema.ToolChoice),
    (response_types.EasyInputMessageParam, schema.InputItem),
    (response_input_item_param.Message, schema.InputItem),
    (response_input_item_param.FunctionCallOutput, schema.InputItem),
    (response_types.ResponseOutputMessageParam, schema.InputItem),
    (response_types.ResponseFunctionToolCallParam, schema.InputItem),
    (response_types.ResponseReasoningItemParam, schema.InputItem),
    (response_types.ResponseInputTextParam, schema.Part),
    (response_types.ResponseOutputTextParam, schema.Part),
    (response_types.ResponseOutputRefusalParam, schema.Part),
    (response_types.FunctionToolParam, schema.ResponseTool),
    (response_types.ToolChoiceFunctionParam, schema.ResponseToolChoice),
    (response_types.ResponseTextConfigParam, schema.TextOptions),
    (response_types.ResponseFormatTextJSONSchemaConfigParam, schema.TextFormat),
    (shared_params.response_format_json_schema.JSONSchema, schema.JsonSchemaFormat),
]


@pytest.mark.parametrize(("official", "kind"), OFFICIAL, ids=lambda each: each.__name__)
def test_every_field_of_the_official_types_is_known(official: Any, kind: Kind) -> None:
    assert names(official) <= {*kind.__struct_fields__, *OTHER_FIELDS[kind]}


def test_every_value_of_include_is_known() -> None:
    """As one of which there is none here, or refused by name."""
    include = typing.get_args(response_types.ResponseIncludable)
    nothing = OTHER_FIELDS[schema.ResponsesBody]["include"].neutral_items
    assert set(include) - set(nothing) == {"message.output_text.logprobs"}
    assert set(nothing) <= set(include)


@in_loop
async def test_a_top_p_of_0_is_the_most_likely_token_and_an_empty_stop_is_none(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        for path, body in {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.items():
            for more in ({"top_p": 0}, {"top_p": 0.0, "top_k": 5}):
                assert (await http.post(path, json=body | more)).status_code == 200
            assert (await http.post(path, json=body | {"stop": ""})).json()["usage"] is not None
        wrong = await http.post("/v1/completions", json={"prompt": "x", "stop": ["", "a"]})
        assert wrong.status_code == 400
    sampling = [submit.sampling for submit in link.of(Submit)]
    assert [(each.top_k, each.top_p) for each in sampling] == [(1, 1.0), (1, 1.0), (0, 1.0)] * 2
