"""Tools and calls that are refused."""

import json
from typing import Any

import pytest

from headrace.core.messages.frontend import Submit
from headrace.engine.grammar.checker import CheckerConfig
from headrace.server.api.request.tools import ARGUMENTS
from headrace.server.frontend.grammar_checker import GrammarChecker
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import SHORT_TEXT_BYTES, Tokenizer
from tests.server.api.test_tools import CALL, CHAT, STUB, USER, WEATHER, served
from tests.server.fakes import client, in_loop, json_of, saying


def calling(**changed: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant", "tool_calls": [CALL | changed]}]}


def function_with(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "only function"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    (function_with(name="a b"), "tools[0].function.name", "1 to 64 letters"),
    (function_with(name="x" * 65), "tools[0].function.name", "1 to 64 letters"),
    (function_with(parameters={"type": "string"}), "tools[0].function.parameters.type", "object"),
    (function_with(parameters=[]), "tools[0].function.parameters", "an object"),
    (function_with(examples=[]), "tools[0].function.examples", "unknown field"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "two functions"),
    (
        {"tools": [{"function": {"name": f"f{number}"}} for number in range(129)]},
        "tools",
        "has 129 functions; at most 128",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "'any'"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
        "not among the tools",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice.type", "only"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.function", ""),
    ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "regex", "given together"),
    ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "contradict"),
    ({"tools": [WEATHER], "regex": "a"}, "tools", "JSON schema"),
    (
        {**function_with(parameters={"properties": {"a": {"not": {}}}}), "json_schema": {}},
        "tools[0].function.parameters",
        "cannot be kept to",
    ),
    (
        {**function_with(parameters={"properties": {"a": {"not": {}}}}), "tool_choice": "required"},
        "tools[0].function.parameters",
        "cannot be kept to",
    ),
    (calling(type="custom"), "messages[1].tool_calls[0].type", "only function"),
    (calling(id=""), "messages[1].tool_calls[0].id", "1 to 128"),
    (calling(kind="x"), "messages[1].tool_calls[0].kind", "unknown field"),
    (calling(function={"name": "f", "arguments": "[1]"}), "messages[1].tool_calls[0].function.arguments", "object"),
    (calling(function={"name": "f", "arguments": "{"}), "messages[1].tool_calls[0].function.arguments", "object"),
    (calling(function={"name": "", "arguments": ""}), "messages[1].tool_calls[0].function.name", "1 to 64"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "required"),
    (
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        "messages[1].tool_call_id",
        "no message before it",
    ),
    ({"messages": [USER | {"tool_call_id": "c1"}]}, "messages[0].tool_call_id", "role tool"),
]


@in_loop
async def test_what_is_wrong_is_refused_by_name() -> None:
    async with served(saying(STUB, "x")) as (service, link), client(service) as http:
        service.model._grammars = GrammarChecker(CheckerConfig("stub:vocab=300", "", 300))
        for body, field, words in REFUSED:
            answer = await http.post(CHAT, json={"messages": [USER], **body})
            error = json_of(answer)["error"]
            assert (answer.status_code, error["param"]) == (400, field), (body, error)
            assert words in error["message"], error
        assert not link.of(Submit)


@in_loop
async def test_a_model_whose_template_has_no_tools_is_refused(tokenizer: Tokenizer) -> None:
    async with served(saying(tokenizer, "x"), tokenizer) as (service, _), client(service) as http:
        for path in (CHAT, "/tokenize"):
            answer = await http.post(path, json={"messages": [USER], "tools": [WEATHER]})
            error = json_of(answer)["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "no_tools", "tools")
        answer = await http.post(CHAT, json={"messages": [USER], "tools": [WEATHER], "tool_choice": "none"})
        assert answer.status_code == 200
        answer = await http.post("/tokenize", json={"prompt": "x", "tools": [WEATHER]})
        assert json_of(answer)["error"]["param"] == "tools"


def called(*arguments: str) -> list[dict[str, Any]]:
    """Calls of the assistant with these arguments."""
    return [CALL | {"function": {"name": "get_weather", "arguments": given}} for given in arguments]


MOST_LISTS = ARGUMENTS[0].most
MANY = MOST_LISTS // 2 + 1  # lists in one of two calls
LISTS = '{"a": [' + ",".join(["[]"] * MANY) + "]}"
QUOTED = json.dumps({"code": "[" * 3 * MOST_LISTS + '"\\{'})  # no lists, but a text with brackets


@pytest.mark.parametrize(
    ("arguments", "status"),
    [((LISTS, LISTS), 413), ((LISTS, '{"a', LISTS), 400), ((LISTS,), 200), ((QUOTED,) * 2, 200)],
)
@in_loop
async def test_arguments_of_calls_are_bounded_before_they_are_decoded(arguments: tuple[str, ...], status: int) -> None:
    """They are JSON in a text of the body, whose own bounds they are not counted in."""
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": called(*arguments)}]
    items = [
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": given} for given in arguments
    ]
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": 1},
        "/tokenize": {"messages": messages},
        "/v1/responses": {"input": [USER, *items], "max_output_tokens": 1},
    }
    async with served(saying(STUB, "x"), length=100_000) as (service, _), client(service) as http:
        for path, body in bodies.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == status, (path, answer.text)
            if status == 413:
                assert f"more than {MOST_LISTS} lists and objects" in json_of(answer)["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/tokenize"])
@in_loop
async def test_tools_that_cannot_fit_are_not_rendered(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter of the chat template holds up all other clients while it writes them."""
    monkeypatch.setattr(ChatTemplate, "render", lambda *_: pytest.fail("they are rendered"))
    parameters = {"type": "object", "properties": {"a": {"enum": [0] * (SHORT_TEXT_BYTES // 2)}}}
    function = {"name": "f", "parameters": parameters}
    given = {"tools": [{"type": "function", "function": function}], "messages": [USER]}
    if path == "/v1/responses":
        given = {"tools": [{"type": "function", **function}], "input": "hi"}
    async with served(saying(STUB, "x")) as (service, _), client(service) as http:
        answer = await http.post(path, json=given)
    assert answer.status_code == 400
    error = json_of(answer)["error"]
    assert error["code"] == "prompt_too_long"
    assert "bytes of tools, calls and variables" in error["message"]
