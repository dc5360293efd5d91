"""Tools of POST /v1/chat/completions: what the model gets to see, what comes back, and what is refused."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

from headrace.core.messages.frontend import Submit
from headrace.core.types import packed
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.server.frontend.service import Service
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.api.test_fields import AnyConstraint
from tests.server.fakes import FakeLink, Script, client, in_loop, json_of, listening, running, saying

STUB = load_tokenizer("stub:vocab=300", "")  # its chat template has tools, as hermes writes them
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city", "parameters": CITY},
}
TIME: ChatCompletionToolParam = {"type": "function", "function": {"name": "get_time"}}
PARIS = '{"city": "Paris"}'
CALLS = (
    f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
USER = {"role": "user", "content": "hi"}
CHAT = "/v1/chat/completions"
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": PARIS}}


@asynccontextmanager
async def served(
    script: Script, tokenizer: Tokenizer = STUB, length: int = 4000
) -> AsyncIterator[tuple[Service, FakeLink]]:
    link = FakeLink(script)
    async with running(link, tokenizer, length=length) as service:
        service.model._grammars = AnyConstraint()
        yield service, link


async def posted(script: Script, body: dict[str, Any], path: str = CHAT) -> tuple[httpx.Response, FakeLink]:
    async with served(script) as (service, link), client(service) as http:
        chat = {} if path == "/v1/responses" else {"messages": [USER]}
        return await http.post(path, json=chat | body), link


@asynccontextmanager
async def sdk(script: Script) -> AsyncIterator[AsyncOpenAI]:
    async with (
        served(script) as (service, _),
        listening(service) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as ai,
    ):
        yield ai


@in_loop
async def test_calls_are_those_of_the_official_sdk() -> None:
    async with sdk(saying(STUB, CALLS, "stop")) as ai:
        answer = await ai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tools=[WEATHER, TIME]
        )
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see.\n"
    calls = choice.message.tool_calls
    assert calls is not None
    assert [(call.type, call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("function", "get_weather", PARIS),
        ("function", "get_time", "{}"),
    ]
    assert len({call.id for call in calls}) == 2


@in_loop
async def test_a_stream_adds_up_to_the_same() -> None:
    async with (
        sdk(saying(STUB, CALLS, "stop")) as ai,
        ai.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "x"}], tools=[WEATHER, TIME], n=2
        ) as stream,
    ):
        events = [event async for event in stream]
        done = await stream.get_final_completion()
    for choice in done.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see.\n"
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()] == [
            ("get_weather", PARIS),
            ("get_time", "{}"),
        ]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(pieces) > len(PARIS), "arguments come as they are written"


@in_loop
async def test_chunks_have_id_and_name_once_and_first() -> None:
    answer, _ = await posted(saying(STUB, CALLS, "stop"), {"tools": [WEATHER, TIME], "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [part for chunk in chunks for c in chunk["choices"] for part in c["delta"].get("tool_calls", ())]
    for index in (0, 1):
        first, *rest = [part for part in parts if part["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert all(set(part) == {"index", "function"} and set(part["function"]) == {"arguments"} for part in rest)
    assert not any(chunk["choices"][0]["delta"].get("content") == "" for chunk in chunks[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@in_loop
async def test_logprobs_are_of_every_token() -> None:
    answer, _ = await posted(
        saying(STUB, CALLS, "stop"), {"tools": [WEATHER, TIME], "stream": True, "logprobs": True, "top_logprobs": 1}
    )
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    entries = [
        entry for chunk in chunks for c in chunk["choices"] for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(entry["token"] for entry in entries) == CALLS


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_text_without_calls_stays_text(stream: bool) -> None:
    for text, reason in (("a < b <tool_call>{}", "stop"), ("plain <tool", "length"), ("", "stop")):
        answer, _ = await posted(saying(STUB, text, reason), {"tools": [WEATHER], "stream": stream})
        if stream:
            chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            said = "".join(choice["delta"].get("content", "") for choice in choices)
            assert (said, choices[-1]["finish_reason"]) == (text, reason)
        else:
            (choice,) = json_of(answer)["choices"]
            assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
            assert choice["finish_reason"] == reason


@in_loop
async def test_calls_are_not_read_where_none_are_asked_for() -> None:
    for body in ({"tools": [WEATHER], "tool_choice": "none"}, {}, {"tools": []}):
        answer, link = await posted(saying(STUB, CALLS, "stop"), body)
        (choice,) = json_of(answer)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
        assert prompt_of(link) == "user: hi\nassistant: "


@in_loop
async def test_one_call_without_parallel_ones() -> None:
    answer, _ = await posted(saying(STUB, CALLS, "stop"), {"tools": [WEATHER, TIME], "parallel_tool_calls": False})
    (choice,) = json_of(answer)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_weather"]


@in_loop
async def test_calls_that_have_to_be_made_are_a_constraint() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, single in (("required", False), (named, True)):
        _, link = await posted(saying(STUB, CALLS, "stop"), {"tools": [WEATHER, TIME], "tool_choice": choice})
        (submit,) = link.of(Submit)
        assert submit.constraint is not None
        assert submit.constraint.kind == "grammar"
        assert submit.sampling.grammar == submit.constraint.key
        assert ("get_time" in submit.constraint.text) is not single
        assert ("{0," in submit.constraint.text) is not single


@in_loop
async def test_calls_that_may_be_made_keep_to_strict_functions_and_leave_other_text_free() -> None:
    """A constraint is there where the body asks for one, and not for other tools."""
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"tools": [WEATHER, TIME]}, ""),
        ({"tools": [strict, TIME]}, ""),  # no token tells calls from text
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "start: calls | answer"),
        ({"tools": [WEATHER], "json_schema": {"enum": [1]}}, "start: calls | answer"),
    ]
    for body, start in bodies:
        _, link = await posted(saying(STUB, "x", "stop"), body)
        (submit,) = link.of(Submit)
        assert (submit.constraint is None) is (start == "")
        assert submit.constraint is None or start in submit.constraint.text
    backend = stub_tokenizer("stub:vocab=300")
    backend.add_tokens(["<tool_call>"])
    marked, link = Tokenizer(backend, (END,), ChatTemplate(CHAT_TEMPLATE, {})), FakeLink(saying(STUB, "x", "stop"))
    async with running(link, marked, length=4000) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        answer = await http.post(CHAT, json={"messages": [USER], "tools": [strict, TIME]})
        assert answer.status_code == 200, answer.text
    (submit,) = link.of(Submit)
    assert "start: FREE | FREE calls" in submit.constraint.text
    assert "<[300]>" in submit.constraint.text


@in_loop
async def test_the_model_sees_tools_calls_and_results() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER]}
    answer, link = await posted(saying(STUB, "It is sunny.", "stop"), body)
    assert answer.status_code == 200, answer.text
    function = json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}})
    expected = (
        f"tools: {json.dumps([WEATHER])}\nuser: hi\nassistant: <tool_call>{function}</tool_call>\n"
        "tool: sunny\nassistant: "
    )
    assert prompt_of(link) == expected
    answer, _ = await posted(saying(STUB, ""), body, "/tokenize")
    assert json_of(answer)["tokens"] == STUB.encode(expected)


@in_loop
async def test_responses_have_calls_as_items() -> None:
    function = {"type": "function", "strict": False, **WEATHER["function"]}
    time = {"type": "function", "name": "get_time", "parameters": None, "strict": False}
    asked: dict[str, Any] = {"model": "tiny", "input": "x", "tools": [function, time]}
    async with sdk(saying(STUB, CALLS, "stop")) as ai:
        whole = await ai.responses.create(**asked)
        async with ai.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    for response in (whole, streamed):
        assert (response.status, response.output_text) == ("completed", "Let me see.\n")
        assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
        calls = [item for item in response.output if item.type == "function_call"]
        assert [(call.name, call.arguments, call.status) for call in calls] == [
            ("get_weather", PARIS, "completed"),
            ("get_time", "{}", "completed"),
        ]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == PARIS + "{}"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@in_loop
async def test_calls_and_results_of_responses_are_those_of_chats() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": PARIS}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    function = {"type": "function", **WEATHER["function"]}
    turns = [USER, {"role": "assistant", "content": "Hm."}, call, call | {"call_id": "c2"}, result]
    _, link = await posted(saying(STUB, "x", "stop"), {"input": turns, "tools": [function]}, "/v1/responses")
    messages = [
        USER,
        {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, CALL | {"id": "c2"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    _, other = await posted(saying(STUB, "x", "stop"), {"messages": messages, "tools": [WEATHER]})
    assert prompt_of(link) == prompt_of(other)
    named = {"input": "x", "tools": [function], "tool_choice": {"type": "function", "name": "get_weather"}}
    _, link = await posted(saying(STUB, CALLS, "stop"), named, "/v1/responses")
    (submit,) = link.of(Submit)
    assert submit.constraint is not None
    answer, _ = await posted(
        saying(STUB, "x"), named | {"tool_choice": {"type": "function", "name": "f"}}, "/v1/responses"
    )
    assert json_of(answer)["error"]["param"] == "tool_choice.name"


def prompt_of(link: FakeLink) -> str:
    (submit,) = link.of(Submit)
    return STUB.decode(packed.unpack(submit.prompt).tolist())
