"""Reasoning and calls of each model family over HTTP, whole and streamed, told by its chat template."""

import json
import re
from typing import Any

import pytest

from headrace.core.messages.frontend import Submit
from headrace.engine.model.stub import END, stub_tokenizer
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls.marks import MARKS
from tests.server.api.test_fields import AnyConstraint
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
ARGUMENTS = '{"city": "Paris", "days": 2}'
# By family: what its template has, and an answer.
FAMILIES: dict[str, tuple[str, str]] = {
    "Qwen3": (
        "<tool_call></think>",
        f'<think>\nHm.\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    ),
    "Qwen3.5": (
        "<tool_call><function=</think>",
        "<think>\nHm.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    "DeepSeek V3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁sep｜></think>",
        f"<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "GLM 4.5": (
        "<tool_call><arg_key></think>",
        "\n<think>Hm.</think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
    ),
    "Kimi K2 Thinking": (
        "<|tool_calls_section_begin|></think>",
        "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "Gemma 4": (
        "<|tool_call><channel|>",
        '<|channel>thought\nHm.\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>',
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ARGUMENTS}",
    ),
}


def tokenizer_of(told: str) -> Tokenizer:
    """A token a byte, and one for each mark."""
    backend = stub_tokenizer("stub:vocab=300")
    backend.add_special_tokens([*MARKS, "<think>", "</think>", "<|channel>", "<channel|>"])
    return Tokenizer(backend, (END,), ChatTemplate(f"{{# {told} #}}{{{{ tools }}}}{{{{ messages }}}}", {}))


@pytest.mark.parametrize("family", FAMILIES)
@in_loop
async def test_reasoning_and_calls_are_told_apart(family: str) -> None:
    told, text = FAMILIES[family]
    tokenizer = tokenizer_of(told)
    link = FakeLink(saying(tokenizer, text, "stop"))
    async with running(link, tokenizer, length=9000) as service, client(service) as http:
        (choice,) = json_of(await http.post("/v1/chat/completions", json=CHAT))["choices"]
        streamed = await http.post("/v1/chat/completions", json={**CHAT, "stream": True})
        tools = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
        items = json_of(await http.post("/v1/responses", json={"input": "hi", "tools": tools}))["output"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", None), message
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert choice["finish_reason"] == "tool_calls"
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    parts: list[dict[str, Any]] = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert [part["function"]["name"] for part in parts if "id" in part] == ["get_weather"]
    assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    assert len(parts) > 3, "arguments come as they are written"
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    assert items[1]["arguments"] == call["function"]["arguments"]


@pytest.mark.parametrize("family", FAMILIES)
@in_loop
async def test_a_call_without_reasoning(family: str) -> None:
    told, text = FAMILIES[family]
    call = re.split(r"</think>\s*|<channel\|>|<\|start\|>assistant", text)[1]
    tokenizer = tokenizer_of(told)
    async with (
        running(FakeLink(saying(tokenizer, call, "stop")), tokenizer, length=9000) as service,
        client(service) as http,
    ):
        (choice,) = json_of(await http.post("/v1/chat/completions", json=CHAT))["choices"]
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (None, None)
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)


@pytest.mark.parametrize("family", FAMILIES)
@in_loop
async def test_a_call_may_be_forced_behind_reasoning(family: str) -> None:
    told, text = FAMILIES[family]
    tokenizer = tokenizer_of(told)
    link = FakeLink(saying(tokenizer, text, "stop"))
    async with running(link, tokenizer, length=9000) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        assert (await http.post("/v1/chat/completions", json={**CHAT, "tool_choice": "required"})).status_code == 200
        (submit,) = link.of(Submit)
        assert submit.constraint is not None
        assert submit.constraint.text.startswith("start: thoughts? ")


@in_loop
async def test_what_a_family_cannot_be_kept_to_is_refused() -> None:
    tokenizer = tokenizer_of(FAMILIES["GLM 4.5"][0])
    limited = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": limited}}]
    async with running(FakeLink(), tokenizer, length=9000) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        answer = await http.post("/v1/chat/completions", json={**CHAT, "tools": tools, "tool_choice": "required"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "tools cannot be kept to as this model writes calls: f: a limited string cannot be kept to in this form, but "
        "for an enum"
    )
