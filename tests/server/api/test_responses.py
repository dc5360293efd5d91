"""POST /v1/responses: through the official SDK, behind a router, and with wrong fields."""

import asyncio
from typing import Any

import openai
import pytest

from headrace.core.messages.frontend import RefuseTicket, Submit
from headrace.core.messages.replies import RequestFailed, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import SendTo
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_handoff import NIXL, ROOM, computing
from tests.server.api.test_sdk import sdk
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying

TURNS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "world"}]},
    {"role": "user", "content": "hello"},
]
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": "z" * 999}, "input", "the limit is"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "it has to be message, function_call"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "empty"),
    (
        {"input": "x", "include": ["reasoning.encrypted_content", "message.output_text.logprobs"]},
        "include",
        "no logprobs",
    ),
    ({"input": [{"type": "reasoning", "role": "user"}]}, "input[0].role", "no field of an item of type reasoning"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "required"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "1"}]},
        "input[0].arguments",
        "object",
    ),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[0].call_id",
        "no function_call",
    ),
    (
        {"input": [{"role": "user", "content": "x", "output": "y"}]},
        "input[0].output",
        "no field of an item of type message",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "only text"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url", "required"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input[0].content[0].image_url",
        "images are not taken",
    ),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only function"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema", "required"),
    ({"input": "x", "text": {"format": "json"}}, "text.format", "expected an object"),
    ({"input": "x", "background": True}, "background", "not supported"),
    ({"input": "x", "n": 2}, "n", "not supported"),
    ({"input": "x", "temperature": 3}, "temperature", "from 0 to 2"),
]


@in_loop
async def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world", reason="stop", cached=1)) as ai:
        answer = await ai.responses.create(model="tiny", input="hi!", text={"format": {"type": "text"}}, store=False)
        assert (answer.status, answer.output_text, answer.error) == ("completed", "hello world", None)
        assert answer.usage is not None
        assert (answer.usage.input_tokens_details.cached_tokens, answer.usage.output_tokens) == (1, 2)
        cut = await ai.responses.create(model="tiny", input="hi!", max_output_tokens=1, extra_body={"ignore_eos": True})
        assert (cut.output_text, cut.usage and cut.usage.output_tokens) == ("hello", 1)
        same = await ai.responses.create(model="tiny", input="hi!", extra_body={"ignore_eos": True, "max_tokens": 1})
        assert same.output_text == "hello", "the name of the other routes is taken, too"


@in_loop
async def test_the_length_ends_it(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world")) as ai:
        answer = await ai.responses.create(model="tiny", input="hi!")
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"


@in_loop
async def test_a_stream_of_events(tokenizer: Tokenizer) -> None:
    async with sdk(tokenizer, saying(tokenizer, "hello world 🙂", reason="stop")) as ai:
        events = [event async for event in await ai.responses.create(model="tiny", input="hi!", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    last = events[-1]
    assert last.type == "response.completed"
    assert "".join(deltas) == last.response.output_text == "hello world 🙂"


@in_loop
async def test_instructions_and_turns_are_one_conversation(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        for body in ({"input": TURNS, "instructions": "he"}, {"input": "hello"}):
            assert (await http.post("/v1/responses", json=body)).status_code == 200
    long, short = (list(unpack(submit.prompt)) for submit in link.of(Submit))
    words = (("system", "he"), ("user", "hello"), ("assistant", "world"), ("user", "hello"))
    assert long == tokenizer.encode_chat([{"role": role, "content": content} for role, content in words])
    assert short == tokenizer.encode_chat([{"role": "user", "content": "hello"}])


@in_loop
async def test_mistakes_are_named(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        for body, field, message in MISTAKES:
            response = await http.post("/v1/responses", json=body)
            error = json_of(response)["error"]
            assert (response.status_code, error["param"]) == (400, field), (body, error)
            assert message in error["message"], (body, error)
    assert link.of(Submit) == []


@in_loop
async def test_a_failure_keeps_its_status_until_the_stream_has_begun(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="stage_failed", message="stage 0 died", status=503)

    def script(link: FakeLink, submit: Submit) -> list[Any]:
        begun = [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello")))] if len(link.of(Submit)) == 2 else []
        return [*begun, RequestFailed(rid=submit.rid, error=error)]

    async with sdk(tokenizer, script) as ai:
        with pytest.raises(openai.InternalServerError, match="stage 0 died"):
            await ai.responses.create(model="tiny", input="x", stream=True)
        events = [event async for event in await ai.responses.create(model="tiny", input="x", stream=True)]
    last = events[-1]
    assert last.type == "error"
    assert (last.code, last.message, last.sequence_number) == ("stage_failed", "stage 0 died", len(events) - 1)


@in_loop
async def test_behind_a_router(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        body = {"input": "hello", "max_output_tokens": 1, "stream": True}
        room = await http.post("/v1/responses", json={**body, **ROOM})
        held = await http.post("/v1/responses", json={**body, "kv_transfer_params": NIXL})
        refused = await http.post("/v1/responses", json={**body, "top_p": 7, **ROOM})
        told = await asyncio.wait_for(link.wait_for(RefuseTicket), 5)
        nameless = await http.post("/v1/responses", json=body)
    first, second = link.of(Submit)
    assert (first.route, first.sampling.max_tokens) == (SendTo("room:7"), 1)
    assert second.route == SendTo(json_of(held)["kv_transfer_params"]["ticket"], hold=True)
    assert second.sampling.max_tokens > 1, "the limit is the router's, not the client's"
    assert json_of(room)["output"][0]["content"][0]["text"] == tokenizer.decode([7])
    assert "kv_transfer_params" not in json_of(room)
    assert (refused.status_code, told.ticket) == (400, "room:7")
    assert (nameless.status_code, json_of(nameless)["error"]["code"]) == (404, "wrong_role")
