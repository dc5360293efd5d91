"""Tools through routers: both servers render the same prompt, and force or read the same calls."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.routers.fleet import Router, Site
from tests.routers.test_texts import CHAT

pytestmark = pytest.mark.routers

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
USER = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Bonn", "days": 1}'},
}


def posted(router: Router, **body: Any) -> httpx.Response:
    answer = router.post(CHAT, {"model": "tested", "messages": [USER], "tools": TOOLS, "max_tokens": 900, **body})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_required_calls_are_made(router: Router, site: Site, choice: Any) -> None:
    body = {"tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    whole = posted(router, **body).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert (call["function"]["name"], whole["finish_reason"]) == ("get_weather", "tool_calls")
    lines = [line for line in posted(router, stream=True, **body).text.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line[6:])["choices"]]
    parts = [part["function"] for choice in choices for part in choice["delta"].get("tool_calls") or ()]
    assert "".join(part.get("arguments") or "" for part in parts) == call["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    site.quiet()


def test_a_conversation_with_calls_is_the_same_prompt(router: Router, site: Site) -> None:
    """As the decode server has it by itself: the text of the stub model follows from its prompt."""
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    body = {"model": "tested", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 12}
    alone = site.decode.post(CHAT, body).json()
    through = posted(router, **body).json()
    assert through["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
    assert through["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    site.quiet()


def test_functions_without_parameters(router: Router, site: Site) -> None:
    """Two routers read chats themselves, and refuse what OpenAI's API has no need of."""
    tools = [{"type": "function", "function": {"name": "get_time"}}]
    answer = router.post(CHAT, {"model": "tested", "messages": [USER], "tools": tools, "tool_choice": "required",
                                "parallel_tool_calls": False, "max_tokens": 200})  # fmt: skip
    if router.name == "dynamo":
        found = answer.json()["choices"][0]["message"].get("tool_calls", ())  # it reads no call without arguments
        assert {each["function"]["name"] for each in found} <= {"get_time"}
    elif router.name in ("vllm-nixl", "vllm-mooncake", "sglang"):
        assert answer.status_code in (400, 422), answer.text
        assert "parameters" in answer.text
    else:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_time", {})
    site.quiet()
