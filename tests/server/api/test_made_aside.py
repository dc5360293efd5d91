"""What takes long in a response is put together in another thread than the one that serves all clients."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Tokens
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import TokenLogprob
from headrace.server.api.openai import responses_format
from headrace.server.api.openai.echo import Echo
from headrace.server.api.openai.response_items import OutputItems
from headrace.server.api.sglang.generate_format import GenerateFormat
from headrace.server.frontend.generation.runner import FEW_LOGPROBS
from headrace.server.http.streaming import made_aside
from headrace.text.answers.answer_parser import AnswerParser
from headrace.text.logprobs import LogprobEntry
from headrace.text.tokenizer import load_tokenizer
from tests.server.fake_prefills import ANSWER, Prefills, decode, fetched
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, logprob_parts, running

STUB = load_tokenizer("stub:vocab=300", "")  # a token a character
TEXT = "hello " * 4000
CHAT = {"messages": [{"role": "user", "content": "hello"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
# What is made aside: by which method or function, for which request.
CASES: list[tuple[Any, str, str, dict[str, Any]]] = [
    (AnswerParser, "whole", "/v1/chat/completions", CHAT),
    (OutputItems, "push", "/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "f"}]}),
    (responses_format, "prompt_logprobs", "/v1/responses", {"input": "hello", "prompt_logprobs": 1}),
    (responses_format, "prompt_logprobs", "/v1/responses", {"input": "hello", "prompt_logprobs": 1, "stream": True}),
    (Echo, "text", "/v1/completions", {"prompt": TEXT, "echo": True, "max_tokens": 1}),
    (GenerateFormat, "_object", "/generate", {"text": "hello", "return_logprob": True, "stream": True}),
]


def answering(_link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
    """A long text, and as many logprobs of the prompt, all at once."""
    ids = STUB.encode(TEXT)[: submit.sampling.max_tokens]
    scored = [TokenLogprob(token, -0.5) for token in ids]
    tokens = Tokens(
        rid=submit.rid, tokens=tuple(ids), logprobs=tuple(scored) if submit.sampling.logprobs is not None else ()
    )
    end = finished(submit.rid, "stop", prompt=len(unpack(submit.prompt)), completion=len(ids))
    return [*logprob_parts(submit.rid, scored if submit.sampling.prompt_logprobs else []), tokens, end]


@pytest.mark.parametrize(("owner", "name", "path", "body"), CASES, ids=[f"{path} {name}" for _, name, path, _ in CASES])
@in_loop
async def test_what_takes_long_is_made_in_another_thread(
    owner: Any, name: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, threads = getattr(owner, name), []

    def watched(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*args)

    monkeypatch.setattr(owner, name, watched)
    lengths: dict[str, Any] = {} if path == "/v1/completions" else {"max_tokens": len(TEXT)}
    if path == "/generate":
        lengths = {"sampling_params": {"max_new_tokens": len(TEXT)}}
    async with running(FakeLink(answering), STUB, length=100_000) as service, client(service) as http:
        response = await http.post(path, json=body | lengths)
    assert response.status_code == 200, response.text
    assert threads
    assert threading.current_thread() not in threads


@in_loop
async def test_others_have_their_turn_between_thousands_of_small_choices() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    serving = asyncio.create_task(other())
    for _ in range(1000):
        await made_aside(dict, 1)
    serving.cancel()
    assert turns > 900


@in_loop
async def test_logprobs_of_a_prefill_server_are_made_ours_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, made = [], LogprobEntry.plain

    def watched(entry: LogprobEntry) -> TokenLogprob:
        threads.append(threading.current_thread())
        return made(entry)

    monkeypatch.setattr(LogprobEntry, "plain", watched)
    entry = {"id": 1, "text": "x", "logprob": -0.5, "top_logprobs": []}
    answer = ANSWER | {"prompt_logprobs": [None, *[entry] * 2 * FEW_LOGPROBS]}
    prefills = Prefills(lambda _body: httpx.Response(200, json=answer))
    async with decode(FakeLink(fetched(STUB)), STUB, prefills, length=100_000) as (_, http):
        response = await http.post("/v1/completions", json={"prompt": "x", "prompt_logprobs": 0})
    assert len(json_of(response)["choices"][0]["prompt_logprobs"]) == 2 * FEW_LOGPROBS + 1
    assert len(threads) == 2 * FEW_LOGPROBS
    assert threading.current_thread() not in threads
