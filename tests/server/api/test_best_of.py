"""best_of of completions: the best choices by mean logprob, over a scripted scheduler."""

from collections.abc import Iterable
from itertools import count
from typing import Any

import msgspec
import pytest

from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import AnySchedulerReply, Tokens
from headrace.core.types.requests.request import TokenLogprob
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, Script, client, finished, in_loop, json_of, running

LOGPROBS = {"a": [-3.0, -1.0], "b": [-1.0, -1.5], "c": [-0.5], "d": [-1.0, -1.5], "e": [-0.1, -9.0]}


def choosing(tokenizer: Tokenizer) -> Script:
    """A script that answers the prompts in turn with a letter as often as it has logprobs, the last time with EOS."""
    numbers = count()

    def script(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        letter = list(LOGPROBS)[next(numbers) % len(LOGPROBS)]
        tokens = [*tokenizer.encode(letter) * (len(LOGPROBS[letter]) - 1), tokenizer.eos_ids[0]]
        for token, logprob in zip(tokens, LOGPROBS[letter], strict=True):
            entries = () if submit.sampling.logprobs is None else (TokenLogprob(token, logprob),)
            yield Tokens(rid=submit.rid, tokens=(token,), logprobs=entries)
        yield finished(submit.rid, "stop", prompt=len(submit.prompt) // 4, completion=len(tokens))

    return script


async def asked(tokenizer: Tokenizer, body: dict[str, Any]) -> tuple[dict[str, Any], list[Submit]]:
    link = FakeLink(choosing(tokenizer))
    async with running(link, tokenizer) as service, client(service) as http:
        return json_of(await http.post("/v1/completions", json=body)), link.of(Submit)


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"best_of": 5}, [""]),  # c: the token that ends the text has a logprob, too
        ({"best_of": 5, "n": 2}, ["", "b"]),
        ({"best_of": 5, "n": 4}, ["", "b", "d", "a"]),  # equal ones in their order; e is the worst
        ({"best_of": 2, "n": 2}, ["a", "b"]),  # all of them, as they were generated
        ({"n": 2}, ["a", "b"]),
        ({"best_of": 1}, ["a"]),
    ],
)
@in_loop
async def test_the_best_are_returned_in_order(fields: dict[str, int], texts: list[str], tokenizer: Tokenizer) -> None:
    answer, submits = await asked(tokenizer, {"prompt": "hi", "seed": 3, **fields})
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert all(choice["logprobs"] is None for choice in answer["choices"]), "they were not asked for"
    generated = fields.get("best_of", fields.get("n", 1))
    assert [submit.sampling.seed for submit in submits] == list(range(3, 3 + generated))
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 2
    assert usage["completion_tokens"] == sum(len(each) for each in list(LOGPROBS.values())[:generated])


@in_loop
async def test_logprobs_that_were_asked_for_are_those_of_the_best(tokenizer: Tokenizer) -> None:
    answer, submits = await asked(tokenizer, {"prompt": "hi", "best_of": 2, "logprobs": 0})
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.5]
    assert {submit.sampling.logprobs for submit in submits} == {0}


@in_loop
async def test_every_prompt_has_its_best(tokenizer: Tokenizer) -> None:
    answer, _ = await asked(tokenizer, {"prompt": ["hi", "ho"], "best_of": 2})
    assert [choice["text"] for choice in answer["choices"]] == ["b", ""]  # of a and b, and of c and d


@in_loop
async def test_a_stream_may_name_as_many_as_it_gets(tokenizer: Tokenizer) -> None:
    link = FakeLink(choosing(tokenizer))
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"prompt": "hi", "n": 2, "best_of": 2, "stream": True}
        lines = (await http.post("/v1/completions", json=body)).text.split("\n\n")
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}
