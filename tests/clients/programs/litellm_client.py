"""LiteLLM as openai/ and hosted_vllm/: chats, texts, responses, tools, answers sent back. Arguments: URL, model."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch it
import litellm

BASE, MODEL = sys.argv[1:]
WHERE = {"api_base": f"{BASE}/v1", "api_key": "k", "max_retries": 0}
MESSAGES = [{"role": "user", "content": "Which city?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
    "maxProperties": 1,  # hosted_vllm takes additionalProperties out of tools
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


def chats(name: str) -> None:
    asked = {"model": name, "messages": MESSAGES, "max_tokens": 8, "seed": 1, "user": "u", **WHERE}
    asked |= {"metadata": {"trace": "t"}, "temperature": 0.5, "top_p": 0.9}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 8


def tools(name: str) -> None:
    asked = {"model": name, "tools": TOOLS, "max_tokens": 2000, **WHERE}
    message = litellm.completion(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
    calls = message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in ("Paris", "Rome")
    results = [{"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "rain"} for call in calls]
    history = [*MESSAGES, {**message.model_dump(), "reasoning_content": "thought"}, *results]
    assert litellm.completion(messages=history, **{**asked, "max_tokens": 4}).usage.completion_tokens == 4


def texts(name: str) -> None:
    provider, _, model = name.partition("/")
    asked = f"text-completion-openai/{model}" if provider == "openai" else name
    answer = litellm.text_completion(model=asked, prompt="One two", max_tokens=4, logprobs=1, **WHERE)
    assert answer.usage.completion_tokens == 4


def schemas(name: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = litellm.completion(model=name, messages=MESSAGES, response_format=form, max_tokens=2000, **WHERE)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def responses(name: str) -> None:
    # 16 is OpenAI's least, which it raises others to
    answer = litellm.responses(model=name, input="Which city?", max_output_tokens=16, **WHERE)
    assert answer.usage.output_tokens == 16
    assert (
        len(list(litellm.responses(model=name, input="Which city?", max_output_tokens=16, stream=True, **WHERE))) > 16
    )


for provider in ("openai", "hosted_vllm"):
    for check in (chats, tools, texts, schemas, responses):
        check(f"{provider}/{MODEL}")
        print(provider, check.__name__, flush=True)
