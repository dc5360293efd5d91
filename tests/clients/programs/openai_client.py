"""The openai package: models, completions, chats, responses, tools, schemas, errors. Arguments: URL, model."""

import sys
from collections.abc import Callable
from typing import Literal

import openai
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{BASE}/v1", api_key="k", max_retries=0)
MESSAGES = [{"role": "user", "content": "Which city?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "Of a city", "parameters": CITY}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def refusal(work: Callable[[], object]) -> openai.APIStatusError:
    """The error that it ends with."""
    try:
        work()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it was served")


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    missing = refusal(lambda: client.models.retrieve("org/other"))
    assert (missing.status_code, missing.code) == (404, "model_not_found")


def completions() -> None:
    asked = {"model": MODEL, "prompt": "One two", "max_tokens": 8, "logprobs": 2, "seed": 1}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    offsets = [at for choice in choices if choice.logprobs for at in choice.logprobs.text_offset]
    assert offsets == whole.choices[0].logprobs.text_offset
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 8


def chats() -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=8, seed=1)
    chunks = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=8, seed=1, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    again = [*MESSAGES, whole.choices[0].message, {"role": "user", "content": "Sure?"}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=4).usage.completion_tokens == 4


def tools() -> None:
    asked = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "max_tokens": 2000}
    message = client.chat.completions.create(messages=MESSAGES, **asked).choices[0].message
    [call] = message.tool_calls
    assert City.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    with client.chat.completions.stream(messages=[*MESSAGES, message, result], **asked) as stream:
        [second] = stream.get_final_completion().choices[0].message.tool_calls
    assert City.model_validate_json(second.function.arguments)


def schemas() -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=2000)
    message = parsed.choices[0].message
    assert isinstance(message.parsed, City)
    client.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, *MESSAGES], max_tokens=1)
    response = client.responses.parse(model=MODEL, input="Which city?", text_format=City, max_output_tokens=2000)
    assert isinstance(response.output_parsed, City)
    client.responses.create(model=MODEL, input=[*response.output, *MESSAGES], max_output_tokens=1)


def responses() -> None:
    asked = {"model": MODEL, "tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "required"}
    asked |= {"store": False, "include": ["reasoning.encrypted_content"], "max_output_tokens": 2000}
    history = [*MESSAGES, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}]
    with client.responses.stream(input=history, parallel_tool_calls=False, **asked) as stream:
        response = stream.get_final_response()
    [call] = [item for item in response.output if item.type == "function_call"]
    history += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    answer = client.responses.create(input=history, **{**asked, "tool_choice": "none", "max_output_tokens": 4})
    assert answer.status == "incomplete"
    assert answer.output_text
    assert answer.usage.output_tokens == 4


def errors() -> None:
    for field, value in {"messages": [], "temperature": 9, "audio": {"voice": "a"}}.items():
        asked = {"messages": MESSAGES, field: value}
        refused = refusal(lambda asked=asked: client.chat.completions.create(model=MODEL, **asked))
        assert (refused.status_code, refused.param) == (400, field)


for check in (models, completions, chats, tools, schemas, responses, errors):
    check()
    print(check.__name__, flush=True)
