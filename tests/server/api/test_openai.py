"""Completions and chat over a scripted scheduler."""

from typing import Any, cast

import msgspec
import pytest

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.replies import Progress, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import DecodeHere
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, failing, in_loop, json_of, running, saying


def events(text: str) -> list[dict[str, object]]:
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]


@in_loop
async def test_a_completion(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello world 🙂", cached=2))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/completions", json={"prompt": "hi!", "max_tokens": 20, "model": "tiny"}))
    assert answer["choices"] == [
        {"index": 0, "text": "hello world 🙂", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 7,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    timing = answer["headrace"]["timing_ms"]
    assert timing["total"] == round(sum(value for name, value in timing.items() if name != "total"), 3) == 97.5
    (submit,) = link.of(Submit)
    assert list(unpack(submit.prompt)) == tokenizer.encode("hi!")
    assert submit.route == DecodeHere()
    assert submit.sampling.stop_token_ids == tokenizer.eos_ids
    assert link.of(Abort) == []


@in_loop
async def test_every_sampling_field_reaches_the_scheduler(tokenizer: Tokenizer) -> None:
    fields = {"temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1, "max_tokens": 5, "min_tokens": 2, "seed": 9}
    changed = {"presence_penalty": -2, "frequency_penalty": 1.5, "repetition_penalty": 1.25, "logit_bias": {"7": -1}}
    more = {"priority": 3, "deadline_s": 2.5, "cache_salt": "mine", "ignore_eos": True, "stop_token_ids": [7, 7]}
    link = FakeLink(saying(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"prompt": [1, 2], **fields, **changed, **more, "logprobs": 2, "prompt_logprobs": 0}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    (submit,) = link.of(Submit)
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 0.5, 0.1)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (5, 2, 9)
    assert (sampling.stop_token_ids, sampling.logprobs, sampling.prompt_logprobs) == ((7,), 2, 0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 1.5, 1.25)
    assert sampling.logit_bias == ((7, -1.0),)
    assert (submit.terms.priority, submit.terms.deadline_s, submit.terms.cache_salt) == (3, 2.5, "mine")


@in_loop
async def test_prompts_in_all_forms_and_n(tokenizer: Tokenizer) -> None:
    for prompt, count in (("ab", 1), ([1, 2], 1), (["ab", "c"], 2), ([[1, 2], [3]], 2)):
        link = FakeLink(saying(tokenizer, "hello"))
        async with running(link, tokenizer) as service, client(service) as http:
            answer = json_of(await http.post("/v1/completions", json={"prompt": prompt, "n": 3, "seed": 5}))
        assert [choice["index"] for choice in answer["choices"]] == list(range(3 * count))
        submits = link.of(Submit)
        assert len({submit.rid for submit in submits}) == 3 * count
        assert [submit.sampling.seed for submit in submits] == [5, 6, 7] * count
        assert answer["usage"]["prompt_tokens"] == (2 if count == 1 else 3)
        assert answer["usage"]["completion_tokens"] == 3 * count


@in_loop
async def test_a_stop_string_cuts_the_text_and_ends_the_request(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> list[Tokens]:
        return [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello world")))]  # and goes on until aborted

    link = FakeLink(script)
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/completions", json={"prompt": "x", "stop": ["lo wo"]}))
    assert answer["choices"][0]["text"] == "hel"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 2
    assert [abort.finish for abort in link.of(Abort)] == [True]


@in_loop
async def test_a_token_that_contains_the_stop_ends_it_in_the_engine(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello.\n\n", reason="stop"))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/completions", json={"prompt": "x", "stop": "\n\n"}))
    assert answer["choices"][0]["text"] == "hello."
    ids = link.of(Submit)[0].sampling.stop_token_ids
    assert {tokenizer.piece(token) for token in ids} == {"<eos>", "\n\n", ".\n\n"}
    assert link.of(Abort) == []


@pytest.mark.parametrize("keep", [{}, {"include_stop_str_in_output": True}, {"no_stop_trim": True}])
@pytest.mark.parametrize(
    ("said", "fields", "cut", "kept", "reason"),
    [
        ("hello world", {"stop": ["lo wo"]}, "hel", "hello wo", "lo wo"),
        ("hello.\n\n", {"stop": ["never", "\n\n"]}, "hello.", "hello.\n\n", "\n\n"),
        ("hello.\n\n", {"stop_token_ids": [".\n\n"]}, "hello", "hello.\n\n", ".\n\n"),
        ("hello<eos>", {"stop": "never"}, "hello", "hello", None),
        ("hello<eos>", {"stop_token_ids": ["<eos>"]}, "hello", "hello", "<eos>"),
    ],
)
@in_loop
async def test_what_ends_the_text_is_named_and_kept_if_wanted(
    said: str,
    fields: dict[str, Any],
    cut: str,
    kept: str,
    reason: str | None,
    keep: dict[str, bool],
    tokenizer: Tokenizer,
) -> None:
    """As a whole, in a stream, and with SGLang's names. A stop token is named by its id."""
    named: str | int | None = reason
    if "stop_token_ids" in fields:
        (named,) = ids = tokenizer.encode(fields["stop_token_ids"][0])
        fields = {"stop_token_ids": ids}
    expected = kept if keep else cut
    link = FakeLink(saying(tokenizer, said, reason="stop"))
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"prompt": "x", "logprobs": 0, **fields, **keep}
        (choice,) = json_of(await http.post("/v1/completions", json=body))["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", named)
        assert choice["logprobs"]["tokens"].count("<eos>") == said.count("<eos>")
        chunks = events((await http.post("/v1/completions", json={**body, "stream": True})).text)
        choices = [choice for chunk in chunks for choice in cast(list[dict[str, Any]], chunk["choices"])]
        assert "".join(each["text"] for each in choices) == expected
        assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", named)
        sampling = {**fields, "no_stop_trim": bool(keep)}
        answer = json_of(await http.post("/generate", json={"text": "x", "sampling_params": sampling}))
        assert answer["text"] == expected
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": named}


@in_loop
async def test_the_end_token_is_counted_and_not_shown(tokenizer: Tokenizer) -> None:
    """A completion's logprobs are those of all completion tokens, in a stream too."""
    link = FakeLink(saying(tokenizer, "hello<eos>", reason="stop"))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/completions", json={"prompt": "x", "logprobs": 1}))
        lines = (await http.post("/v1/completions", json={"prompt": "x", "logprobs": 1, "stream": True})).text
    assert answer["choices"][0]["text"] == "hello"
    whole = answer["choices"][0]["logprobs"]
    assert (whole["tokens"], whole["text_offset"]) == (["hello", "<eos>"], [0, 5])
    assert answer["usage"]["completion_tokens"] == 2
    parts = [choice["logprobs"] for chunk in events(lines) for choice in chunk["choices"] if choice["logprobs"]]  # type: ignore[attr-defined]
    for field, values in whole.items():
        assert [value for part in parts for value in part[field]] == values


@in_loop
async def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello é"))
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/completions", json={"prompt": "x", "logprobs": 2}))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["hello", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["text_offset"] == [0, 5, 6, 6]
    for name, tops in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert tops[name] == -0.25, "the token itself is among the alternatives"
        assert len(tops) in (2, 3)


@in_loop
async def test_a_chat_uses_the_template_and_the_room_that_is_left(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "logprobs": True, "top_logprobs": 1}
    async with running(link, tokenizer) as service, client(service) as http:
        answer = json_of(await http.post("/v1/chat/completions", json=body))
        await http.post("/v1/chat/completions", json={**body, "max_tokens": 9, "max_completion_tokens": 4})
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    first, second = link.of(Submit)
    assert list(unpack(first.prompt)) == prompt
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (64 - len(prompt), 4)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "hello"
    (entry,) = choice["logprobs"]["content"]
    assert (entry["token"], entry["bytes"], len(entry["top_logprobs"])) == ("hello", list(b"hello"), 1)


@in_loop
async def test_a_streamed_chat_says_the_same_in_parts(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello world 🙂"))
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2}
    async with running(link, tokenizer) as service, client(service) as http:
        response = await http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 14  # type: ignore[index]
    for index in range(2):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]  # type: ignore[attr-defined]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "hello world 🙂"
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


@in_loop
async def test_progress_is_streamed_if_requested(tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> list[object]:
        rid = submit.rid
        return [Progress(rid=rid, phase="computing", done=2, total=3), *saying(tokenizer, "hello")(link, submit)]

    link = FakeLink(script)  # type: ignore[arg-type]
    body = {"prompt": "x", "stream": True, "stream_options": {"include_progress": True}}
    async with running(link, tokenizer) as service, client(service) as http:
        chunks = events((await http.post("/v1/completions", json=body)).text)
    assert chunks[0]["headrace"] == {"choice": 0, "phase": "computing", "done": 2, "total": 3}
    assert link.of(Submit)[0].progress


@in_loop
async def test_a_failure_before_the_first_token_keeps_its_status_even_when_streaming(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="queue_full", message="full", status=429, retry_after_s=2.2)
    async with running(FakeLink(failing(error)), tokenizer) as service, client(service) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert json_of(response)["error"]["code"] == "queue_full"


@in_loop
async def test_a_failure_during_a_stream_is_an_event_of_the_stream(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="stage_failed", message="stage 0 died", status=503, stage=0)

    def script(link: FakeLink, submit: Submit) -> list[object]:
        return [Tokens(rid=submit.rid, tokens=tuple(tokenizer.encode("hello"))), *failing(error)(link, submit)]

    async with running(FakeLink(script), tokenizer) as service, client(service) as http:  # type: ignore[arg-type]
        chunks = events((await http.post("/v1/completions", json={"prompt": "x", "stream": True})).text)
    assert chunks[-1]["error"] == {
        "message": "stage 0 died",
        "type": "server_error",
        "param": None,
        "code": "stage_failed",
        "status": 503,
        "stage": 0,
    }


@in_loop
async def test_when_one_choice_fails_the_others_are_cancelled(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="stage_failed", message="died", status=503)

    def script(link: FakeLink, submit: Submit) -> list[object]:
        return failing(error)(link, submit) if submit.rid.endswith("-1") else []  # type: ignore[return-value]

    link = FakeLink(script)  # type: ignore[arg-type]
    async with running(link, tokenizer) as service, client(service) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x", "n": 3})).status_code == 503
        await link.wait_for(Abort, 2)
    assert {abort.rid[-2:] for abort in link.of(Abort)} == {"-0", "-2"}


@in_loop
async def test_models(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, served_model_name="mine") as service, client(service) as http:
        (model,) = json_of(await http.get("/v1/models"))["data"]
        assert (model["id"], model["max_model_len"]) == ("mine", 64)
        assert json_of(await http.get("/v1/models/mine")) == model
        assert json_of(await http.get("/v1/models/tiny"))["id"] == "tiny", "by the other name that requests may give"
        for name in ("mine", "tiny"):
            refusal = await http.post("/v1/completions", json={"prompt": [], "model": name})
            assert json_of(refusal)["error"]["param"] == "prompt", "the name itself is fine"
        assert (await http.post("/v1/completions", json={"prompt": "x", "model": "other"})).status_code == 404
        for name in ("other", "org/other", "min", "mine/x", "%2e%2e/mine"):
            missing = await http.get(f"/v1/models/{name}")
            assert (missing.status_code, json_of(missing)["error"]["code"]) == (404, "model_not_found"), name


@in_loop
async def test_names_of_models_may_have_slashes(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, served_model_name="org/mine 1.5") as service, client(service) as http:
        for path in ("org/mine 1.5", "org/mine%201.5", "org%2Fmine%201.5"):
            answer = await http.get(f"/v1/models/{path}")
            assert (answer.status_code, json_of(answer)["id"]) == (200, "org/mine 1.5"), path
