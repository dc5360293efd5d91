"""Reasoning in answers of chats: told from content by the model's own marks, whole and streamed, and in prompts."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from headrace.core.messages.frontend import Submit
from headrace.core.types import packed
from headrace.engine.model.stub import END, stub_tokenizer
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.tool_calls.marks import HARMONY_MARKS
from tests.server.api.test_fields import AnyConstraint
from tests.server.fakes import FakeLink, Script, client, in_loop, listening, running, saying

Body = dict[str, Any]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "hi"}
TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ message.content or '' }}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OFF = "{% if not enable_thinking | default(true) %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
MODEL_OPENS = TURNS + OFF  # as Qwen3's template
PROMPT_OPENS = TURNS + "{% if enable_thinking | default(true) %}<think>\n{% endif %}" + OFF  # as Qwen3.5's
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{# <|channel|>analysis<|message|> #}<|start|>assistant"
)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
THOUGHT = "<think>\nIt is é <b>.\n</think>\n\nHello."


def model(template: str, *, tokens: tuple[str, ...] = ("<think>", "</think>"), special: bool = False) -> Tokenizer:
    """A token a byte, and one for each of these marks."""
    backend = stub_tokenizer("stub:vocab=300")
    (backend.add_special_tokens if special else backend.add_tokens)(list(tokens))
    return Tokenizer(backend, (END,), ChatTemplate(template, {}))


async def posted(tokenizer: Tokenizer, text: str | Script, path: str, body: Body, **more: Any) -> tuple[Any, FakeLink]:
    """The answer to a request whose text this is; of a stream, its events."""
    link = FakeLink(saying(tokenizer, text, "stop") if isinstance(text, str) else text)
    async with running(link, tokenizer, length=4000, **more) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        response = await http.post(path, json=({"messages": [USER]} if path == CHAT else {"input": "hi"}) | body)
    return response if "stream" not in body else events_of(response), link


def events_of(response: httpx.Response) -> list[Any]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def message_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


def prompt_of(tokenizer: Tokenizer, link: FakeLink) -> str:
    (submit,) = link.of(Submit)
    return tokenizer.decode(packed.unpack(submit.prompt).tolist(), skip_special=False)


@pytest.mark.parametrize(
    ("template", "text", "reasoning", "content"),
    [
        (MODEL_OPENS, THOUGHT, "It is é <b>.", "Hello."),
        (MODEL_OPENS, "Hello.", None, "Hello."),
        (PROMPT_OPENS, THOUGHT.removeprefix("<think>\n"), "It is é <b>.", "Hello."),
        (PROMPT_OPENS, THOUGHT, "It is é <b>.", "Hello."),  # a model that opens it once more
        (PROMPT_OPENS, "It is cut", "It is cut", ""),
    ],
)
@in_loop
async def test_reasoning_is_told_from_content(template: str, text: str, reasoning: str | None, content: str) -> None:
    tokenizer = model(template)
    response, _ = await posted(tokenizer, text, CHAT, {})
    message = message_of(response)
    assert message.get("reasoning") == message.get("reasoning_content") == reasoning
    assert message["content"] == content
    usage = response.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": usage_of(reasoning, text)}
    chunks, _ = await posted(tokenizer, text, CHAT, {"stream": True, "stream_options": {"include_usage": True}})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content", "") for delta in deltas) == content
    assert chunks[-1]["usage"] == usage


def usage_of(reasoning: str | None, text: str) -> int:
    """Tokens between the marks, white space included: a token a byte."""
    if reasoning is None:
        return 0
    return len(text.removeprefix("<think>").split("</think>")[0].encode())


@in_loop
async def test_a_prompt_that_closes_it_begins_with_content() -> None:
    for template in (MODEL_OPENS, PROMPT_OPENS):
        tokenizer = model(template)
        response, link = await posted(tokenizer, "Hello.", CHAT, {"reasoning_effort": "none"})
        assert prompt_of(tokenizer, link).endswith("<think>\n\n</think>\n\n")
        assert message_of(response)["content"] == "Hello."
        assert "reasoning" not in message_of(response)


@in_loop
async def test_where_the_answer_begins_is_read_from_token_ids_of_routers() -> None:
    tokenizer = model(PROMPT_OPENS)
    ids = tokenizer.encode("anything<think>\n")
    body = {"kv_transfer_params": {"prompt_token_ids": ids}}
    response, _ = await posted(tokenizer, "well</think>Hello.", CHAT, body)
    assert message_of(response)["reasoning"] == "well"


@in_loop
async def test_an_answer_that_is_continued_goes_on_where_its_text_ends() -> None:
    tokenizer = model(MODEL_OPENS)
    for said, text, reasoning in (("<think>so", " far</think>x", "far"), ("<think>so</think>y", "x", None)):
        messages = [USER, {"role": "assistant", "content": said}]
        response, _ = await posted(tokenizer, text, CHAT, {"messages": messages, "continue_final_message": True})
        assert (message_of(response).get("reasoning"), message_of(response)["content"]) == (reasoning, "x")


@in_loop
async def test_clients_may_do_without_it() -> None:
    tokenizer = model(MODEL_OPENS)
    response, _ = await posted(tokenizer, THOUGHT, CHAT, {"include_reasoning": False})
    assert message_of(response) == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    response, _ = await posted(tokenizer, THOUGHT, CHAT, {"separate_reasoning": False})
    assert message_of(response)["content"] == THOUGHT
    response, _ = await posted(tokenizer, THOUGHT, CHAT, {}, reasoning_parser="none")
    assert message_of(response)["content"] == THOUGHT
    assert "completion_tokens_details" not in response.json()["usage"]


@in_loop
async def test_a_model_that_is_not_known_to_reason_has_content_alone() -> None:
    plain = "{% for message in messages %}{{ message.content }}{% endfor %}"
    response, _ = await posted(model(plain, tokens=()), THOUGHT, CHAT, {})
    assert message_of(response)["content"] == THOUGHT
    response, _ = await posted(model(plain), THOUGHT, CHAT, {})  # told by its vocabulary
    assert message_of(response)["content"] == "Hello."
    response, _ = await posted(model(plain, tokens=()), THOUGHT, CHAT, {}, reasoning_parser="think")
    assert message_of(response)["content"] == "Hello."


@in_loop
async def test_channels_of_gpt_oss() -> None:
    tokenizer = model(HARMONY, tokens=HARMONY_MARKS, special=True)
    text = "<|channel|>analysis<|message|>They greet.<|end|><|start|>assistant<|channel|>final<|message|>Hello."
    for stream in (False, True):
        body: Body = {"stream": True} if stream else {}
        answer, _ = await posted(tokenizer, text, CHAT, body)
        choices = [chunk["choices"][0]["delta"] for chunk in answer] if stream else [message_of(answer)]
        assert "".join(each.get("reasoning", "") for each in choices) == "They greet."
        assert "".join(each.get("content", "") for each in choices) == "Hello."


@in_loop
async def test_responses_have_an_item_of_it() -> None:
    tokenizer = model(MODEL_OPENS)
    whole, _ = await posted(tokenizer, THOUGHT, RESPONSES, {})
    reasoning, message = whole.json()["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["id"].startswith("rs_")
    assert reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "It is é <b>."}]
    assert message["content"][0]["text"] == "Hello."
    tokens = usage_of("", THOUGHT)
    assert whole.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": tokens}
    events, _ = await posted(tokenizer, THOUGHT, RESPONSES, {"stream": True})
    kinds = [event["type"].removeprefix("response.") for event in events if not event["type"].endswith("delta")]
    parts = ["content_part.added", "{}.done", "content_part.done", "output_item.done"]
    expected = [
        each.format(kind) for kind in ("reasoning_text", "output_text") for each in ("output_item.added", *parts)
    ]
    assert kinds == ["created", "in_progress", *expected, "completed"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "It is é <b>."


@in_loop
async def test_the_official_sdk_reads_the_stream_of_responses() -> None:
    tokenizer = model(MODEL_OPENS)
    link = FakeLink(saying(tokenizer, THOUGHT, "stop"))
    async with (
        running(link, tokenizer, length=4000) as service,
        listening(service) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as ai,
        ai.responses.stream(model="tiny", input="hi") as stream,
    ):
        events = [event async for event in stream]
        done = await stream.get_final_response()
    assert "response.reasoning_text.done" in [event.type for event in events]
    assert done.output_text == "Hello."
    assert done.output[0].type == "reasoning"
    assert done.output[0].content is not None
    assert done.output[0].content[0].text == "It is é <b>."


@in_loop
async def test_earlier_reasoning_goes_to_the_template() -> None:
    tokenizer = model(MODEL_OPENS)
    prompts = []
    answer = {"role": "assistant", "content": "yes"}
    for path, body in (
        (CHAT, {"messages": [USER, {**answer, "reasoning_content": "well"}, USER]}),
        (CHAT, {"messages": [USER, {**answer, "reasoning": "well"}, USER]}),
        (
            RESPONSES,
            {
                "input": [
                    USER,
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "well"}]},
                    {"type": "message", **answer},
                    USER,
                ]
            },
        ),
    ):
        _, link = await posted(tokenizer, "x", path, body)
        prompts.append(prompt_of(tokenizer, link))
    assert "<think>\nwell\n</think>\n\nyes" in prompts[0]
    assert prompts == prompts[:1] * 3


@in_loop
async def test_effort_of_responses_is_a_variable_of_the_template() -> None:
    tokenizer = model("{{ reasoning_effort }} {{ enable_thinking }}")
    for effort, prompt in (("low", "low True"), ("none", "none False")):
        _, link = await posted(tokenizer, "x", RESPONSES, {"reasoning": {"effort": effort, "summary": "auto"}})
        assert prompt_of(tokenizer, link) == prompt


@in_loop
async def test_a_call_ends_reasoning_that_the_model_has_not_closed() -> None:
    tokenizer = model("{{ tools }}<tool_call>" + PROMPT_OPENS)
    text = 'I call. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    response, _ = await posted(tokenizer, text, CHAT, {"tools": [{"type": "function", "function": FUNCTION}]})
    message = message_of(response)
    assert message["reasoning"] == "I call."
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"


@in_loop
async def test_a_constraint_applies_after_it() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    for template, begin in ((PROMPT_OPENS, "start: rest answer"), (MODEL_OPENS, "start: thoughts? answer")):
        tokenizer = model(template)
        _, link = await posted(tokenizer, "x</think>{}", CHAT, {"response_format": schema})
        (submit,) = link.of(Submit)
        assert submit.constraint is not None
        assert submit.constraint.kind == "grammar"
        assert submit.constraint.text.startswith(begin)
        _, link = await posted(tokenizer, "{}", CHAT, {"response_format": schema, "reasoning_effort": "none"})
        (submit,) = link.of(Submit)
        assert submit.constraint is not None
        assert submit.constraint.kind == "json"


@in_loop
async def test_a_grammar_in_gbnf_is_all_of_the_text() -> None:
    tokenizer = model(PROMPT_OPENS)
    response, link = await posted(tokenizer, "yes", CHAT, {"ebnf": 'root ::= "yes"'})
    (submit,) = link.of(Submit)
    assert submit.constraint is not None
    assert submit.constraint.text.startswith("root")
    assert message_of(response)["content"] == "yes"
