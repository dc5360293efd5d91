"""echo of POST /v1/completions over a scripted scheduler."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import TokenLogprob
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, Script, client, in_loop, json_of, logprob_parts, running, saying

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


def scoring(tokenizer: Tokenizer, text: str, reason: str = "length") -> Script:
    """Answers as saying() does, with a logprob for each position of the prompt: minus its number."""
    says = saying(tokenizer, text, reason)

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        sampling, prompt = submit.sampling, unpack(submit.prompt).tolist()
        first = max(1, sampling.prompt_logprobs_start)
        best = tuple(range(sampling.prompt_logprobs or 0))
        entries = [
            TokenLogprob(token, -float(at), best, tuple(-float(rank) for rank in best))
            for at, token in enumerate(prompt[first:], first)
        ]
        if sampling.prompt_logprobs is not None:
            yield from logprob_parts(submit.rid, entries, first)
        yield from says(link, submit)

    return script


async def completion(tokenizer: Tokenizer, body: dict[str, Any], script: Script | None = None, **server: Any) -> Any:
    link = FakeLink(script or scoring(tokenizer, "hello world"))
    async with running(link, tokenizer, **server) as service, client(service) as http:
        response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return json_of(response), link.of(Submit)


@pytest.mark.parametrize("prompt", ["hé! 🙂", "x"])
@pytest.mark.parametrize("as_ids", [False, True])
@in_loop
async def test_the_prompt_comes_before_the_text(tokenizer: Tokenizer, prompt: str, as_ids: bool) -> None:
    given = tokenizer.encode(prompt) if as_ids else prompt
    answer, (submit,) = await completion(tokenizer, {"prompt": given, "echo": True})
    (choice,) = answer["choices"]
    expected = {"index": 0, "text": prompt + "hello world", "logprobs": None}
    assert choice == {**expected, "finish_reason": "length", "stop_reason": None}
    assert submit.sampling.prompt_logprobs is None
    assert answer["usage"]["completion_tokens"] == len(tokenizer.encode("hello world"))


@in_loop
async def test_logprobs_are_those_of_prompt_and_text(tokenizer: Tokenizer) -> None:
    """In OpenAI's form: one list over both, nothing for the first token, and offsets into the text. The token that
    ended the text is the last one."""
    body = {"prompt": "é hello", "echo": True, "logprobs": 2}
    answer, (submit,) = await completion(tokenizer, body, scoring(tokenizer, "hello<eos>", "stop"))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("é hellohello", "stop")
    assert submit.sampling.prompt_logprobs == submit.sampling.logprobs == 2
    ids = tokenizer.encode("é hello")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", " ", "hello", "hello", "<eos>"]
    assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -0.25, -0.25]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 7, 12]
    tops = logprobs["top_logprobs"]
    assert tops[0] is None
    for position, token in list(enumerate(ids))[1:]:
        best = {tokenizer.piece(rank): -float(rank) for rank in range(2)}
        assert tops[position] == best | {logprobs["tokens"][position]: -float(position)}, "the token itself is there"
        assert token == ids[position]
    assert choice.keys() == {"index", "text", "logprobs", "finish_reason", "stop_reason"}, "they are not told twice"


@in_loop
async def test_several_prompts_and_choices(tokenizer: Tokenizer) -> None:
    prompts = ["a", "bc", "hello world"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer, submits = await completion(tokenizer, {"prompt": given, "echo": True, "logprobs": 0, "n": 2})
        assert len(submits) == 6
        for index, choice in enumerate(answer["choices"]):
            assert choice["text"] == prompts[index // 2] + "hello world"
            count = len(ids[index // 2])
            assert choice["logprobs"]["token_logprobs"][:count] == [None, *(-float(at) for at in range(1, count))]


@pytest.mark.parametrize("n", [1, 2])
@in_loop
async def test_max_tokens_0_scores_the_prompt_alone(tokenizer: Tokenizer, n: int) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0, "n": n}
    answer, submits = await completion(tokenizer, body)
    assert [submit.sampling.max_tokens for submit in submits] == [1] * n
    for choice in answer["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert answer["usage"]["completion_tokens"] == 0
    answer, _ = await completion(tokenizer, {"prompt": "abc", "echo": True, "max_tokens": 0})
    end = {"finish_reason": "length", "stop_reason": None}
    assert answer["choices"] == [{"index": 0, "text": "abc", "logprobs": None, **end}]


@in_loop
async def test_logprobs_from_a_position_on(tokenizer: Tokenizer) -> None:
    body = {"prompt": "abcd", "echo": True, "logprobs": 1, "max_tokens": 0, "prompt_logprobs_start": 2}
    answer, (submit,) = await completion(tokenizer, body)
    assert submit.sampling.prompt_logprobs_start == 2
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, None, -2.0, -3.0]
    assert answer["choices"][0]["logprobs"]["top_logprobs"][:2] == [None, None]


@in_loop
async def test_a_stream_begins_with_the_prompt(tokenizer: Tokenizer) -> None:
    body = {"prompt": ["ab", "c"], "echo": True, "stream": True}
    async with running(FakeLink(saying(tokenizer, "hello world")), tokenizer) as service, client(service) as http:
        lines = (await http.post("/v1/completions", json=body)).text.strip().split("\n\n")
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-1]]
    for index, prompt in enumerate(body["prompt"]):  # type: ignore[arg-type, var-annotated]
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [choice["text"] for choice in mine] == [prompt, "hello", " world", ""]


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": 0}, "max_tokens", "without echo it has to be at least 1"),
    ({"echo": True, "max_tokens": 0, "stream": True}, "stream", "nothing to stream"),
    ({"echo": True, "logprobs": 1, "stream": True}, "stream", "is not streamed"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs", "leave out prompt_logprobs"),
    ({"echo": True, "prompt_logprobs_start": 1}, "prompt_logprobs_start", "needs prompt_logprobs"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs_start": 9}, "prompt_logprobs_start", "from 0 to 3"),
    ({"echo": "yes"}, "echo", "expected true or false"),
]


@pytest.mark.parametrize(("fields", "field", "text"), MISTAKES)
@in_loop
async def test_what_does_not_go_together_is_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], field: str, text: str
) -> None:
    link = FakeLink(scoring(tokenizer, "hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        response = await http.post("/v1/completions", json={"prompt": "abc", **fields})
    error = json_of(response)["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert text in error["message"]
    assert link.of(Submit) == []


@in_loop
async def test_behind_a_router_the_prefill_server_has_the_logprobs(tokenizer: Tokenizer) -> None:
    """The router gets them; the decode server, which never does, refuses instead of leaving them out."""
    body = {"prompt": "abc", "echo": True, "logprobs": 1, **ROOM}
    answer, _ = await completion(tokenizer, body, scoring(tokenizer, "d"), role="prefill")
    assert answer["choices"][0]["text"] == "abcd"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.25]
    async with (
        running(FakeLink(), tokenizer, role="decode", prefill=("http://p:1",)) as service,
        client(service) as http,
    ):
        response = await http.post("/v1/completions", json=body)
    assert (response.status_code, json_of(response)["error"]["param"]) == (400, "echo")


@in_loop
async def test_the_prompts_of_the_best_choices_are_their_own(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, " hello"))
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"prompt": ["one", "two"], "echo": True, "n": 2, "best_of": 3}
        answer = json_of(await http.post("/v1/completions", json=body))
    assert [choice["text"] for choice in answer["choices"]] == ["one hello"] * 2 + ["two hello"] * 2
