"""A stream that is put together is the whole answer: each field is derived in one place, on every route.

Random texts in random pieces, ends, stop strings, choices, logprobs, echoes and calls.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Tokens
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_features import MADE_UP, STUB
from tests.server.api.test_fields import AnyConstraint
from tests.server.fakes import (
    FakeLink,
    client,
    finished,
    in_loop,
    logprob_parts,
    made_up_logprob,
    running,
    tiny_tokenizer,
)

Body = dict[str, Any]
Events = list[tuple[str, Any]]
WORDS = [
    "hello",
    " world",
    "é",
    "🙂",
    "日本",
    "\n\n",
    " ",
    "a",
    "<tool_call>",
    '{"name": "f", "arguments": {"a": 1}}',
    "</tool_call>",
    "<think>",
    "</think>",
]
TEXTS = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
STOPS = st.lists(st.sampled_from(["wor", " ", "é", "o w", "🙂a", "\n", "zz", "hello world", "</tool"]), max_size=3)
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
SEED = 100
IDS = rf"{MADE_UP}|fc_[0-9a-f]+"
EXAMPLES = 12  # each of them two requests of up to six choices


class Spoken(msgspec.Struct):
    """What a choice generates."""

    text: str
    pieces: list[int]
    """Tokens in each message."""
    ended: bool
    """By EOS."""


PIECES = st.lists(st.integers(1, 4), min_size=1, max_size=6)
SPOKEN = st.builds(
    Spoken,
    TEXTS | st.sampled_from([f"a {CALL}b", f"<think>é\n</think> a {CALL}", f"<think>{CALL}"]),
    PIECES,
    st.booleans(),
)


def speaking(tokenizer: Tokenizer, spoken: Sequence[Spoken]) -> FakeLink:
    """A scheduler whose choices generate these, by their seeds."""

    def script(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        one = spoken[((submit.sampling.seed or 0) - SEED) % len(spoken)]
        prompt = len(submit.prompt) // 4
        wanted = submit.sampling.logprobs
        left = [*tokenizer.encode(one.text), *([tokenizer.eos_ids[0]] if one.ended else [])] or [0]
        count, reason = len(left), "stop" if one.ended else "length"
        if submit.sampling.prompt_logprobs is not None:
            entries = [made_up_logprob(at, submit.sampling.prompt_logprobs) for at in range(1, prompt)]
            yield from logprob_parts(submit.rid, entries)
        for number in range(count):
            size = one.pieces[number % len(one.pieces)]
            tokens, left = left[:size], left[size:]
            if tokens:
                logprobs = () if wanted is None else tuple(made_up_logprob(token, wanted) for token in tokens)
                yield Tokens(rid=submit.rid, tokens=tuple(tokens), logprobs=logprobs)
        yield finished(submit.rid, reason, prompt=prompt, completion=count, cached=1)

    return FakeLink(script)


async def both(tokenizer: Tokenizer, spoken: Sequence[Spoken], path: str, body: Body) -> tuple[Any, Events]:
    """The whole answer, and the events of the streamed one, without what differs from one request to the next."""
    link = speaking(tokenizer, spoken)
    async with running(link, tokenizer, length=4000) as service, client(service) as http:
        service.model._grammars = AnyConstraint()
        whole = await http.post(path, json=body)
        assert whole.status_code == 200, whole.text
        streamed = await http.post(path, json={**body, "stream": True})
        assert streamed.status_code == 200, streamed.text
    blocks = [block for block in plain(streamed.text).split("\n\n") if block]
    events = [re.fullmatch(r"(?:event: (\S+)\n)?data: (.*)", block) for block in blocks]
    assert all(events)
    return msgspec.json.decode(plain(whole.text)), [
        (event[1] or "", msgspec.json.decode(event[2])) for event in events if event and event[2] != "[DONE]"
    ]


def plain(text: str) -> str:
    """JSON without ids and times."""
    return re.sub(r'"(created|created_at|e2e_latency)":[0-9.e-]+', r'"\1":0', re.sub(IDS, "made-up", text))


def joined(parts: Sequence[Body | None]) -> Body | None:
    """Objects of lists, as one."""
    there = [part for part in parts if part is not None]
    if not there:
        return None
    lists = {
        name: [item for part in there for item in part[name]] for name, value in there[0].items() if value is not None
    }
    return {**dict.fromkeys(there[0]), **lists}


def choices_of(chunks: Sequence[Body]) -> dict[int, list[Body]]:
    found: dict[int, list[Body]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], []).append(choice)
    return found


def put_together(parts: Sequence[Body]) -> Body:
    """A choice out of its chunks."""
    last = parts[-1]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    choice = {name: value for name, value in last.items() if name not in ("delta", "text")}
    choice["logprobs"] = joined([part["logprobs"] for part in parts])
    if "text" in last:
        return {**choice, "text": "".join(part["text"] for part in parts)}
    content, reasoning, calls = "", "", list[Body]()
    for part in parts:
        content += part["delta"].get("content") or ""
        assert part["delta"].get("reasoning") == part["delta"].get("reasoning_content")
        reasoning += part["delta"].get("reasoning") or ""
        for call in part["delta"].get("tool_calls", []):
            if call["index"] == len(calls):
                calls.append({name: value for name, value in call.items() if name != "index"})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    more: Body = {"tool_calls": calls} if calls else {}
    if reasoning:
        more |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return {**choice, "message": {"role": "assistant", "refusal": None, "content": content, **more}}


def like_whole(choice: Body) -> Body:
    """A choice of a whole answer without what a stream has no form for: empty lists of logprobs, and null content."""
    logprobs = choice["logprobs"] if any((choice["logprobs"] or {}).values()) else None
    if "message" in choice:
        choice = {**choice, "message": {**choice["message"], "content": choice["message"]["content"] or ""}}
    return {**choice, "logprobs": logprobs}


OPTIONS = st.fixed_dictionaries(
    {"seed": st.just(SEED), "n": st.integers(1, 3), "stop": STOPS},
    optional={
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 255), max_size=3),
        "min_tokens": st.integers(0, 4),
        "prompt_logprobs": st.integers(0, 2),
    },
)
SEVERAL = st.lists(SPOKEN, min_size=3, max_size=3)
USAGE = {"stream_options": {"include_usage": True}}


def check_choices(tokenizer: Tokenizer, spoken: Sequence[Spoken], path: str, body: Body) -> None:
    @in_loop
    async def run() -> None:
        whole, events = await both(tokenizer, spoken, path, {**body, **USAGE})
        chunks = [event for _, event in events]
        found = choices_of(chunks)
        assert [like_whole(put_together(found[index])) for index in sorted(found)] == [
            like_whole(choice) for choice in whole["choices"]
        ]
        assert chunks[-1]["choices"] == []
        for field in ("usage", "headrace", "model", "id", "created"):
            assert chunks[-1][field] == whole[field]

    run()


@settings(max_examples=EXAMPLES)
@given(SEVERAL, OPTIONS, st.none() | st.integers(0, 3), st.booleans())
def test_completions(spoken: list[Spoken], options: Body, logprobs: int | None, echo: bool) -> None:
    more = {"echo": True} if echo and logprobs is None else {"logprobs": logprobs}
    check_choices(tiny_tokenizer(), spoken, "/v1/completions", {"prompt": ["hello é", "x"], **options, **more})


@settings(max_examples=EXAMPLES)
@given(SEVERAL, OPTIONS, st.booleans(), st.booleans())
def test_chats(spoken: list[Spoken], options: Body, logprobs: bool, tools: bool) -> None:
    more: Body = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    if tools:
        more["tools"] = [{"type": "function", "function": FUNCTION}]
    body = {"messages": [{"role": "user", "content": "hello"}], **options, **more}
    check_choices(STUB, spoken, "/v1/chat/completions", body)


@settings(max_examples=EXAMPLES)
@given(SPOKEN, OPTIONS, st.booleans())
def test_responses(spoken: Spoken, options: Body, tools: bool) -> None:
    @in_loop
    async def run() -> None:
        body = {"input": "hello", **options, "n": 1}
        if tools:
            body["tools"] = [{"type": "function", **FUNCTION}]
        whole, events = await both(STUB, [spoken], "/v1/responses", body)
        kind, last = events[-1]
        assert kind == f"response.{whole['status']}"
        assert last["response"] == whole
        items = [event["item"] for kind, event in events if kind == "response.output_item.done"]
        assert sorted(items, key=str) == sorted(whole["output"], key=str)
        for number, item in enumerate(whole["output"]):
            own = [event for _, event in events if event.get("output_index") == number]
            text = "".join(event["delta"] for event in own if "delta" in event)
            assert text == (item["content"][0]["text"] if item["type"] != "function_call" else item["arguments"])

    run()


@settings(max_examples=EXAMPLES)
@given(SEVERAL, OPTIONS, st.booleans(), st.integers(-1, 2))
def test_generate(spoken: list[Spoken], options: Body, logprobs: bool, start: int) -> None:
    @in_loop
    async def run() -> None:
        named = {"include_stop_str_in_output": "no_stop_trim", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
        sampling = {named.get(name, name): value for name, value in options.items() if name != "prompt_logprobs"}
        body = {"text": ["hello é", "hello"], "sampling_params": sampling, "return_logprob": logprobs}
        body |= {"top_logprobs_num": 1, "logprob_start_len": min(start, 0)}
        whole, events = await both(tiny_tokenizer(), spoken, "/generate", body)
        for number, one in enumerate(whole):
            own = [event for _, event in events if event["index"] == number]
            assert own[-1] == {**one, "index": number}
            for before, after in itertools.pairwise(own):
                assert after["text"].startswith(before["text"])
                assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]

    run()


@in_loop
async def test_offsets_of_tokens_that_are_held_back_for_a_stop_string_are_their_own() -> None:
    """Whether the stop string comes or not, and the same as without any."""
    tokenizer, body = tiny_tokenizer(), {"prompt": "x", "logprobs": 0, "max_tokens": 99}
    spoken = [Spoken(" world, world!", [1], False)]
    expected, _ = await both(tokenizer, spoken, "/v1/completions", body)
    offsets = expected["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 6, 7, 13]
    for stop in (" world!", " worl?"):
        _, events = await both(tokenizer, spoken, "/v1/completions", {**body, "stop": stop})
        logprobs = joined([choice["logprobs"] for _, event in events for choice in event["choices"]])
        assert logprobs is not None
        assert logprobs["text_offset"] == offsets
