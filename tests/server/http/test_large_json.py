"""Large parts of responses: the same JSON, put together beside the event loop."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import TokenLogprob
from headrace.server.http import streaming
from headrace.server.http.streaming import LARGE, PART, encode_lists, made_aside
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, logprob_parts, running, saying

LEAVES = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=3)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=30)


@given(JSON, st.integers(1, 4))
def test_json_is_the_same_in_parts(value: Any, part: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "PART", part)
        expected = msgspec.json.encode(value)
        assert msgspec.json.encode(encode_lists(value)) == expected
        assert msgspec.json.encode(value) == expected, "lists of a choice that goes on are needed again"


def test_long_lists_become_json_and_objects_stay() -> None:
    made = encode_lists({"choices": [{"tops": [{"a": 1.5}] * (PART + 1), "few": [1]}]})
    assert isinstance(made["choices"][0]["tops"], msgspec.Raw)
    assert made["choices"][0]["few"] == [1]


@in_loop
async def test_others_are_served_while_a_large_one_is_made() -> None:
    def make() -> dict[str, Any]:
        return {
            "entries": [{"id": number, "tops": {str(number + k): 0.25 for k in range(5)}} for number in range(60_000)]
        }

    longest, over = 0.0, asyncio.Event()

    async def other() -> None:
        nonlocal longest
        while not over.is_set():
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    serving = asyncio.create_task(other())
    made = await made_aside(make, 60_000)
    over.set()
    await serving
    assert isinstance(made["entries"], msgspec.Raw)
    assert longest < 0.1, "the event loop itself computes nothing of it"


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello world", "prompt_logprobs": 1, "logprobs": 1}),
    ("/v1/completions", {"prompt": "hello world", "echo": True, "logprobs": 1}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "prompt_logprobs": 1,
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    ("/generate", {"text": "hello world", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}),
]


def answer_of(body: dict[str, Any]) -> dict[str, Any]:
    """A body without what differs between two answers."""
    drop = ("id", "created", "headrace", "rid", "e2e_latency")
    return {
        key: answer_of(value) if isinstance(value, dict) else value for key, value in body.items() if key not in drop
    }


@pytest.mark.parametrize(("path", "body"), BODIES)
@in_loop
async def test_an_answer_is_the_same_made_aside(
    path: str, body: dict[str, Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        *said, _ = saying(tokenizer, "hello")(link, submit)
        tokens = list(unpack(submit.prompt))
        scored = [TokenLogprob(token, -0.5, (token, 7), (-0.5, -1.0)) for token in tokens[1:]]
        return [*said, *logprob_parts(submit.rid, scored), finished(submit.rid, "stop")]

    answers = []
    async with running(FakeLink(script), tokenizer) as service, client(service) as http:
        for large in (LARGE, 0):
            monkeypatch.setattr(streaming, "LARGE", large)
            monkeypatch.setattr(streaming, "PART", 2 if large == 0 else PART)
            response = await http.post(path, json=body)
            assert response.status_code == 200, response.text
            answers.append(answer_of(json_of(response)))
    assert answers[0] == answers[1]
    assert "-0.5" in str(answers[0])
