"""The matrix of docs/api.md: every served field has a case, and something else is done with it than without.

By plain HTTP, and by the official SDK.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI
from tokenizers.processors import TemplateProcessing

from headrace.core.messages.frontend import KvHint, Submit
from headrace.engine.model.stub import CHAT_TEMPLATE, END, stub_tokenizer
from headrace.server.api.request import schema
from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.deployment.api_document import BODIES
from tests.features import MEMBERS, OBJECTS, ROUTES, Body, Case, Kind, cases
from tests.server.api.test_fields import AnyConstraint
from tests.server.api.test_handoff import computing
from tests.server.api.test_score import scoring
from tests.server.api.test_tools import CALLS
from tests.server.fakes import FakeLink, Script, client, in_loop, listening, running, saying

KINDS = "cmpl|chatcmpl|score|generative-scoring|rerank|resp|msg|rs|pf|gen|call"
MADE_UP = rf"({KINDS})[-_][0-9a-f]{{16,}}(-\w+)*|chatcmpl-tool-\w+|call_\w+"
NAMES = (
    "{% for message in messages %}{% if message.name is defined %}{{ message.name }}{% endif %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{% endfor %}"
)
THOUGHT = "<think>hm</think>"
BACKEND = stub_tokenizer("stub:vocab=300")
BACKEND.add_special_tokens(["<bos>"])
BOS = BACKEND.token_to_id("<bos>")
BACKEND.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
BACKEND.add_tokens(["<tool_call>"])  # tells calls from text, so that strict functions are a constraint
STUB = Tokenizer(BACKEND, (END,), ChatTemplate(NAMES + CHAT_TEMPLATE, {}))
TIMES = r'"(created|created_at|e2e_latency)":[0-9.e-]+'
SDK = (schema.CompletionBody, schema.ChatBody, schema.ResponsesBody)
FIELDS = [(kind, name, case) for kind in ROUTES for name, case in cases(kind).items()]


def plain(value: Any) -> str:
    """JSON without what differs from one request to the next."""
    text = msgspec.json.encode(value, enc_hook=repr).decode() if not isinstance(value, str) else value
    return re.sub(TIMES, r'"\1":0', re.sub(MADE_UP, "made-up", text))


def said(kind: Kind, response: httpx.Response) -> str:
    """What a response says beyond repeating fields of the body, as those of /v1/responses do."""
    if kind is not schema.ResponsesBody or response.headers["content-type"] != "application/json":
        return plain(response.text)
    answer = response.json()
    return plain({name: value for name, value in answer.items() if name not in kind.__struct_fields__})


def script(kind: Kind, body: Body, role: str) -> Script:
    if issubclass(kind, schema.ScoredBody):
        return scoring
    if kind is schema.PrefillBody or role == "prefill":
        return computing
    thought = THOUGHT if kind in (schema.ChatBody, schema.ResponsesBody) else ""
    return saying(STUB, thought + (CALLS if body.get("tools") else "hello world, hello"), "stop")


def requests(link: FakeLink) -> str:
    """What the scheduler was asked to do."""
    hints = [msgspec.structs.replace(each, token=0) for each in link.of(KvHint)]
    return plain([*(msgspec.structs.replace(each, rid="") for each in link.of(Submit)), *hints])


Ask = Callable[[Kind, Body], Awaitable[tuple[int, str, str]]]


@asynccontextmanager
async def server(role: str) -> AsyncIterator[Ask]:
    """Yields what asks it: for status, response, and the requests to the scheduler that come of a body."""
    link = FakeLink()
    more = {"prefill": ("http://127.0.0.1:9",)} if role == "decode" else {}
    async with running(link, STUB, role=role, length=4000, **more) as service, client(service) as http:
        service.model._grammars = AnyConstraint()

        async def ask(kind: Kind, body: Body) -> tuple[int, str, str]:
            link.script = script(kind, body, role)
            link.sent.clear()
            response = await http.post(ROUTES[kind][0], json=body)
            return response.status_code, said(kind, response) + response.headers["content-type"], requests(link)

        yield ask


async def each_matters(kind: Kind, found: dict[str, Case], around: Callable[[Body], Body]) -> None:
    """With each of these fields something else is done than without. around: a body from the fields."""
    for role in sorted({case.role for case in found.values()}):
        async with server("prefill" if kind is schema.PrefillBody else role) as ask:
            for name, case in found.items():
                if case.role == role:
                    without = await ask(kind, around(case.beside))
                    done = await ask(kind, around(case.beside | {name: case.value}))
                    assert done[0] == case.status, (name, done)
                    assert done != without, name


def given(base: Body) -> Body:
    return {name: value for name, value in base.items() if value is not None}


def test_every_served_field_has_a_case() -> None:
    for kind in BODIES.values():
        named = cases(kind) if kind in ROUTES else MEMBERS[kind]
        assert set(named) == set(kind.__struct_fields__), kind


@pytest.mark.parametrize("kind", ROUTES, ids=lambda kind: kind.__name__)
@in_loop
async def test_a_served_field_changes_what_is_done(kind: Kind) -> None:
    await each_matters(kind, cases(kind), lambda fields: given(ROUTES[kind][1] | fields))


@pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
@in_loop
async def test_a_served_field_of_an_object_does_too(kind: Kind) -> None:
    route, around = OBJECTS[kind]
    await each_matters(route, MEMBERS[kind], lambda fields: ROUTES[route][1] | around(fields))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "name", "case"),
    [each for each in FIELDS if each[0] in SDK and each[2].role == "colocated" and each[2].status == 200],
    ids=lambda each: each if isinstance(each, str) else "",
)
@in_loop
async def test_the_official_sdk_asks_for_the_same(kind: Kind, name: str, case: Case) -> None:
    """Fields that it does not know are its extra_body. What it sends is what was meant, to the scheduler's request."""
    body = given(ROUTES[kind][1] | case.beside) | {name: case.value}
    async with server(case.role) as ask:
        _, _, wanted = await ask(kind, body)
    link = FakeLink(script(kind, body, case.role))
    async with (
        running(link, STUB, length=4000) as service,
        listening(service) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, http_client=httpx.AsyncClient()) as ai,
    ):
        service.model._grammars = AnyConstraint()
        api: Any = {schema.CompletionBody: ai.completions, schema.ChatBody: ai.chat.completions}.get(kind, ai.responses)
        own = {"prompt", "messages", "input", "stream", "tools"}
        known = {key: value for key, value in body.items() if key in own}
        answer = await api.create(
            model="tiny", **known, extra_body={key: value for key, value in body.items() if key not in own}
        )
        if body.get("stream"):
            assert [event async for event in answer]
    assert requests(link) == wanted
