"""langchain-openai: chats, streams, tools, schemas, by both of OpenAI's APIs. Arguments: URL, model."""

import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:]
WHERE: dict[str, Any] = {"base_url": f"{BASE}/v1", "api_key": "k", "max_retries": 0, "model": MODEL}
ASKED = HumanMessage("Which city?")


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chats(responses: bool) -> None:
    chat = made(responses, max_tokens=8)
    whole = chat.invoke([ASKED])
    streamed = None
    for chunk in chat.stream([ASKED]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert streamed.text == whole.text
    assert whole.usage_metadata["output_tokens"] == streamed.usage_metadata["output_tokens"] == 8
    assert chat.invoke([ASKED, whole, ASKED]).usage_metadata["output_tokens"] == 8


def tools(responses: bool) -> None:
    chat = made(responses, max_tokens=2000)
    message = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False, strict=True).invoke([ASKED])
    [call] = message.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    again = made(responses, max_tokens=4).invoke([ASKED, message, result])
    assert again.usage_metadata["output_tokens"] == 4


def schemas(responses: bool) -> None:
    chat = made(responses, max_tokens=2000)
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(City, method=method, strict=True).invoke([ASKED]), City), method


def made(responses: bool, max_tokens: int) -> ChatOpenAI:
    """responses: by OpenAI's newer API."""
    return ChatOpenAI(use_responses_api=responses, max_tokens=max_tokens, stream_usage=True, temperature=0, **WHERE)


for api in (False, True):
    for check in (chats, tools, schemas):
        check(api)
        print("responses" if api else "chat", check.__name__, flush=True)
assert OpenAI(max_tokens=4, **WHERE).invoke("One two")
print("completions", flush=True)
