"""POST /v1/score, /generative_scoring and /v1/rerank: what is asked of the scheduler, answered, and refused."""

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.replies import AnySchedulerReply, Progress, RequestFailed, Tokens
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import Discard, TokenLogprob
from headrace.server.api.scoring.bodies import JUDGE
from headrace.server.api.scoring.items import OPEN_ITEMS, ScoredItem, shared_tokens
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, listening, running

PAGE = 16
SCORE, GENERATIVE, RERANK = "/v1/score", "/generative_scoring", "/v1/rerank"
QUERY = list(range(40))
ITEMS = [[50, 51], [52], [53, 54, 55]]
LABELS = [7, 9]


def logprobs(prompt: tuple[int, ...], labels: tuple[int, ...]) -> list[float]:
    """Made up, of a prompt's last token."""
    return [-0.01 * (1 + prompt[-1]) - 0.5 * index for index in range(len(labels))]


def scoring(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """Progress where it is asked for, and the labels' logprobs."""
    prompt, labels = tuple(unpack(submit.prompt).tolist()), submit.sampling.label_token_ids
    if submit.progress:
        yield Progress(rid=submit.rid, phase="computing", done=len(prompt), total=len(prompt))
    entry = TokenLogprob(3, -0.1, labels, tuple(logprobs(prompt, labels)))
    yield Tokens(rid=submit.rid, tokens=(3,), logprobs=(entry,))
    cached = submit.terms.keep_tokens if not submit.progress else 0
    yield finished(submit.rid, "length", prompt=len(prompt), cached=cached or 0)


def softmax(values: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(value / temperature) for value in values]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("role", ["prefill", "colocated", "decode"])
@in_loop
async def test_sglangs_body_and_answer(role: str, tokenizer: Tokenizer) -> None:
    link = FakeLink(scoring)
    async with running(link, tokenizer, role=role) as service, client(service) as http:
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "cache_salt": "s", "priority": 2}
        plain = json_of(await http.post(SCORE, json={**body, "return_token_logprobs": True}))
        among = json_of(await http.post(SCORE, json={**body, "apply_softmax": True, "temperature": 0.5}))
        each = json_of(await http.post(SCORE, json={**body, "label_token_ids": [[7], [8, 9], [5]]}))
        none = json_of(await http.post(SCORE, json={**body, "items": []}))
    expected = [logprobs(tuple(item), (7, 9)) for item in ITEMS]
    assert plain["token_logprobs"] == [pytest.approx(item) for item in expected]
    assert plain["scores"] == [pytest.approx([math.exp(value) for value in item]) for item in expected]
    assert (plain["object"], plain["model"], plain["pooled_hidden_states"]) == ("scoring", "tiny", None)
    assert plain["usage"] == {
        "prompt_tokens": 126, "completion_tokens": 0, "total_tokens": 126,
        "prompt_tokens_details": {"cached_tokens": 64},
    }  # fmt: skip
    assert among["scores"] == [pytest.approx(softmax(item, 0.5)) for item in expected]
    assert among["token_logprobs"] is None
    assert [len(scores) for scores in each["scores"]] == [1, 2, 1]
    assert (none["scores"], none["usage"]["prompt_tokens"]) == ([], 0)
    first, *_ = submits = link.of(Submit)[:3]
    assert [unpack(submit.prompt).tolist() for submit in submits] == [[*QUERY, *item] for item in ITEMS]
    assert {submit.route for submit in submits} == {Discard()}
    assert [(submit.terms.keep_tokens, submit.terms.priority, submit.progress) for submit in submits] == [
        (32, 2, True), (32, 2, False), (32, 2, False),
    ]  # fmt: skip
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.logprobs) == (1, 0.0, 0)
    assert first.sampling.label_token_ids == (7, 9)


@in_loop
async def test_vllms_body_and_answer(tokenizer: Tokenizer) -> None:
    link = FakeLink(scoring)
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"query": "hello", "items": [" world", [5, 6]], "label_token_ids": LABELS}
        among = json_of(await http.post(GENERATIVE, json=body))
        plain = json_of(await http.post(GENERATIVE, json={**body, "apply_softmax": False, "item_first": True}))
    query, world = tokenizer.encode("hello"), tokenizer.encode(" world")
    prompts = [unpack(submit.prompt).tolist() for submit in link.of(Submit)]
    assert prompts == [[*query, *world], [*query, 5, 6], [*world, *query], [5, 6, *query]]
    scores = [softmax(logprobs(tuple(prompt), (7, 9)))[0] for prompt in prompts[:2]]
    assert among["data"] == [
        {"index": index, "score": pytest.approx(score), "object": "score"} for index, score in enumerate(scores)
    ]
    assert among["object"] == "list"
    assert among["id"].startswith("generative-scoring-")
    assert [item["score"] for item in plain["data"]] == [
        pytest.approx(math.exp(logprobs(tuple(prompt), (7, 9))[0])) for prompt in prompts[2:]
    ]
    assert {submit.terms.keep_tokens for submit in link.of(Submit)} == {0}, "less than a page is shared"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
@in_loop
async def test_documents_come_best_first(path: str, tokenizer: Tokenizer) -> None:
    """Prompts differ in their documents alone; the made-up logprobs are of the template's end, and so are equal."""

    def by_length(_link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        labels, count = submit.sampling.label_token_ids, len(submit.prompt) // 4
        yield Tokens(rid=submit.rid, tokens=(3,), logprobs=(TokenLogprob(3, 0.0, labels, (-count / 99, -1.0)),))
        yield finished(submit.rid, prompt=count)

    link = FakeLink(by_length)
    body = {"query": "who?", "documents": ["aaaa", "b", "cc"], "label_token_ids": LABELS}
    async with running(link, tokenizer, length=4000) as service, client(service) as http:
        ranked = json_of(await http.post(path, json=body))
        two = json_of(await http.post(path, json={**body, "top_n": 2, "return_documents": False}))
        instructed = json_of(await http.post(path, json={**body, "documents": "b", "instruction": "Be kind."}))
        labels = json_of(await http.post(path, json={**body, "label_token_ids": None, "labels": ["x", "hello"]}))
    results = ranked["results"]
    assert [(each["index"], each["document"]) for each in results] == [
        (1, {"text": "b"}), (2, {"text": "cc"}), (0, {"text": "aaaa"}),
    ]  # fmt: skip
    assert sorted((each["relevance_score"] for each in results), reverse=True) == [
        each["relevance_score"] for each in results
    ]
    assert [sorted(each) for each in two["results"]] == [["index", "relevance_score"]] * 2
    assert len(instructed["results"]) == 1
    assert labels["results"][0]["index"] == 1
    submits = link.of(Submit)
    texts = [tokenizer.decode(unpack(submit.prompt).tolist()) for submit in submits]
    assert texts[0].startswith("<|system|>" + JUDGE)
    assert texts[0].endswith("<Query>: who?\n<Document>: aaaa\n<|assistant|>")
    assert "<Instruct>: Be kind.\n" in texts[6]
    assert submits[7].sampling.label_token_ids == tuple(tokenizer.encode("x") + tokenizer.encode("hello"))
    shared = texts[0].index("aaaa")
    assert 0 < submits[0].terms.keep_tokens <= len(tokenizer.encode(texts[0][:shared])) < len(submits[0].prompt) // 4


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (SCORE, {"items": ["a"]}, "label_token_ids"),
    (SCORE, {"items": ["a"], "label_token_ids": []}, "label_token_ids"),
    (SCORE, {"query": "a", "label_token_ids": [1]}, "items"),
    (SCORE, {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items[0]"),
    (SCORE, {"query": [1], "items": [[1], "a"], "label_token_ids": [1]}, "items[1]"),
    (SCORE, {"query": [1], "items": [[1], [9999]], "label_token_ids": [1]}, "items[1][0]"),
    (SCORE, {"query": [9999], "items": [[1]], "label_token_ids": [1]}, "query[0]"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": [1, 9999]}, "label_token_ids[1]"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": [1, 1]}, "label_token_ids"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": [[1], [2]]}, "label_token_ids"),
    (SCORE, {"query": [1], "items": [[1], [2]], "label_token_ids": [[1], 2]}, "label_token_ids"),
    (SCORE, {"query": [1], "items": [[1], [2]], "label_token_ids": [[1], []]}, "label_token_ids[1]"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": list(range(65))}, "label_token_ids"),
    (SCORE, {"query": [], "items": [[1], []], "label_token_ids": [1]}, "items[1]"),
    (SCORE, {"query": [1] * 60, "items": [[1], [2] * 4], "label_token_ids": [1]}, "items[1]"),
    (SCORE, {"query": [1], "items": [[1]] * 1025, "label_token_ids": [1]}, "items"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": [1], "temperature": 2.0}, "temperature"),
    (SCORE, {"query": [1], "items": [[1]], "label_token_ids": [1], "apply_softmax": True, "temperature": 0},
     "temperature"),
    (SCORE, {"queries": "a", "documents": ["b"]}, "queries"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [1], "score_extraction_token": "x"},
     "score_extraction_token"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [1], "stream": True}, "stream"),
    (GENERATIVE, {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
    (GENERATIVE, {"items": ["a"], "label_token_ids": [1]}, "query"),
    (GENERATIVE, {"query": "a", "items": ["b"], "label_token_ids": [[1]]}, "label_token_ids[0]"),
    (GENERATIVE, {"query": "a", "items": ["b"], "label_token_ids": [1], "temperature": 1}, "temperature"),
    (RERANK, {"query": "a", "documents": []}, "documents"),
    (RERANK, {"query": " ", "documents": ["b"]}, "query"),
    (RERANK, {"query": "a", "documents": ["b", ""]}, "documents[1]"),
    (RERANK, {"query": "a", "documents": [{"text": "b"}]}, "documents[0]"),
    (RERANK, {"query": "a", "documents": ["b"]}, "labels[0]"),  # "yes" is three tokens of this model
    (RERANK, {"query": "a", "documents": ["b"], "labels": ["x"]}, "labels"),
    (RERANK, {"query": "a", "documents": ["b"], "label_token_ids": [1, 2, 3]}, "label_token_ids"),
    (RERANK, {"query": "a", "documents": ["b"], "labels": ["x", "y"], "label_token_ids": [1, 2]}, "labels"),
    (RERANK, {"query": "a", "documents": ["b"], "instruction": "x", "instruct": "y"}, "instruct"),
    (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
]  # fmt: skip


@in_loop
async def test_what_is_refused_names_its_field(tokenizer: Tokenizer) -> None:
    link = FakeLink(scoring)
    async with running(link, tokenizer) as service, client(service) as http:
        for path, body, field in REFUSED:
            response = await http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, field), (body, response.text)
        other = await http.post(SCORE, json={"items": ["a"], "label_token_ids": [1], "model": "other"})
        assert (other.status_code, other.json()["error"]["param"]) == (404, "model")
    assert link.of(Submit) == []


@in_loop
async def test_the_others_wait_for_the_first_until_the_prefix_is_there(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        body = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
        asked = asyncio.create_task(http.post(SCORE, json=body))
        first = await link.wait_for(Submit)
        link.say(Progress(rid=first.rid, phase="computing", done=31, total=42))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(link.of(Submit)) == 1, "a page of the prefix is not computed yet"
        link.say(Progress(rid=first.rid, phase="computing", done=32, total=42))
        await link.wait_for(Submit, 3)
        for submit in link.of(Submit):
            for reply in scoring(link, submit):
                link.say(reply)
        assert (await asked).status_code == 200


@pytest.mark.parametrize("begun", [False, True])
@in_loop
async def test_an_item_that_fails_is_named_and_ends_the_others(begun: bool, tokenizer: Tokenizer) -> None:
    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        failing = submit.rid.endswith("-1" if begun else "-0")
        if failing:
            error = ErrorInfo(code="nonfinite_values", message="NaN", status=500, field="prompt")
            return [RequestFailed(rid=submit.rid, error=error)]
        return scoring(link, submit) if submit.rid.endswith("-0") else []

    link = FakeLink(script)
    async with running(link, tokenizer) as service, client(service) as http:
        response = await http.post(SCORE, json={"query": QUERY, "items": ITEMS, "label_token_ids": LABELS})
        assert response.status_code == 500
        assert response.json()["error"]["param"] == ("items[1]" if begun else "items[0]")
        assert response.json()["error"]["message"].endswith(": NaN")
        if begun:
            await link.wait_for(Abort)
            assert [abort.rid[-2:] for abort in link.of(Abort)] == ["-2"]
        else:
            assert len(link.of(Submit)) == 1
        assert service.completions.open_requests == 0


@in_loop
async def test_a_full_server_refuses_the_whole_body(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, max_queued_requests=2) as service, client(service) as http:
        body = {"query": [1], "items": ITEMS, "label_token_ids": LABELS}
        response = await http.post(SCORE, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert response.json()["error"]["message"].startswith("items[2]: ")
        assert response.json()["error"]["code"] == refusals.OPEN_REQUESTS.error(most=2).code
        await link.wait_for(Abort, 2)
        assert service.completions.open_requests == 0


@in_loop
async def test_a_client_that_leaves_cancels_all_items(tokenizer: Tokenizer) -> None:
    """Those that the scheduler has; the others never come there."""
    link = FakeLink()
    async with running(link, tokenizer) as service, listening(service) as url:
        async with httpx.AsyncClient(base_url=url) as http:
            body = {"query": [1], "items": [[2]] * (OPEN_ITEMS + 50), "label_token_ids": LABELS}
            asked = asyncio.create_task(http.post(SCORE, json=body))
            await link.wait_for(Submit, OPEN_ITEMS)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await link.wait_for(Abort, OPEN_ITEMS)
        assert {abort.rid for abort in link.of(Abort)} == {submit.rid for submit in link.of(Submit)}
        assert len(link.of(Submit)) == OPEN_ITEMS
        assert service.completions.open_requests == 0


PARTS = st.lists(st.integers(0, 1), max_size=8).map(tuple)


@given(PARTS, st.lists(PARTS, min_size=1, max_size=4), st.sampled_from([1, 2, 3]))
def test_the_shared_prefix_is_in_all_prompts(head: tuple[int, ...], items: list[tuple[int, ...]], page: int) -> None:
    """The longest one in whole pages: against looking at each length."""
    prompts = [head[:5] + item for item in items]
    found = shared_tokens(head, [ScoredItem("", prompt, ()) for prompt in prompts], page)
    common = [
        count for count in range(0, len(head) + 1, page) if all(prompt[:count] == head[:count] for prompt in prompts)
        and all(len(prompt) >= count for prompt in prompts)
    ]  # fmt: skip
    assert found == max(common)
