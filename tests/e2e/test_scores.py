"""Scores of a real server: the bits of prompt_logprobs, one computation of what items share, and no page that stays."""

import math
import random
from collections.abc import Iterator
from threading import Thread
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, serving, wait_until

PAGE, PREFIX, LENGTH, COUNT = 16, 200, 11, 40
MODEL = ("--model", "stub:layers=2,hidden=32", "--max-model-len", "512", "--kv-pages", "200", "--chunk-tokens", "128")
LABELS = [5, 77, 130]
CACHED = 'headrace_kv_pages{state="cached"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--role", "prefill", *MODEL) as ready:
        yield ready


def drawn(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=count)


def body(seed: int, count: int = COUNT) -> dict[str, Any]:
    items = [drawn(LENGTH, 1000 * seed + index) for index in range(count)]
    return {"query": drawn(PREFIX, seed), "items": items, "label_token_ids": LABELS, "return_token_logprobs": True}


def score(server: Server, fields: dict[str, Any]) -> Any:
    answer = server.post("/v1/score", fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def by_prompt_logprobs(server: Server, prompt: list[int], label: int) -> float:
    """The logprob of a label as the last token of a prompt that is computed whole."""
    answer = server.post(
        "/v1/prefill",
        {"prompt_token_ids": [*prompt, label], "handoff": "none", "prompt_logprobs": 0, "cache_salt": "o"},
    )
    assert answer.status_code == 200, answer.text
    return float(answer.json()["prompt_logprobs"][-1]["logprob"])


def test_scores_have_the_bits_of_prompt_logprobs(server: Server) -> None:
    """Behind the query and before it."""
    for item_first in (False, True):
        fields = {**body(1, 6), "item_first": item_first}
        found = score(server, fields)
        for item, logprobs, scores in zip(fields["items"], found["token_logprobs"], found["scores"], strict=True):
            prompt = [*item, *fields["query"]] if item_first else [*fields["query"], *item]
            assert logprobs == [by_prompt_logprobs(server, prompt, label) for label in LABELS]
            assert scores == [math.exp(each) for each in logprobs]


def test_the_shared_prefix_is_computed_once_and_is_all_that_stays(server: Server) -> None:
    shared = PREFIX // PAGE
    before = server.metrics()
    found = score(server, body(2))
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == (COUNT - 1) * shared * PAGE
    after = server.metrics()
    for name, count in (
        ("headrace_prompt_tokens_total", COUNT * (PREFIX + LENGTH)),
        ("headrace_cached_tokens_total", (COUNT - 1) * shared * PAGE),
    ):
        assert after[name] - before[name] == count
    assert after[CACHED] - before[CACHED] == shared
    again = score(server, body(2))
    assert again["scores"] == found["scores"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == COUNT * shared * PAGE
    assert server.metrics()[CACHED] == after[CACHED]


def test_many_items_are_computed_in_one_pass() -> None:
    """A pass takes longer than it takes to submit them all, so that they arrive while the first one is computed."""
    slow = ("--model", "stub:layers=2,us_per_token=500", "--max-model-len", "512", "--chunk-tokens", "128")
    with serving("--role", "prefill", *slow) as server:
        before = server.total("headrace_plans_total")
        score(server, body(4))
        computed = PREFIX + LENGTH + (COUNT - 1) * (PREFIX % PAGE + LENGTH)
        assert server.total("headrace_plans_total") - before <= computed // 128 + 4


def test_a_client_that_leaves_frees_the_pages_of_all_items() -> None:
    """In the middle of a body that takes seconds."""
    slow = ("--model", "stub:layers=2,us_per_token=1000", "--max-model-len", "2048", "--chunk-tokens", "128")
    with serving("--role", "colocated", *slow) as server:
        fields = body(3, 400)

        def leave() -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/score", json=fields, timeout=httpx.Timeout(10, read=0.8), trust_env=False)

        asking = Thread(target=leave)
        asking.start()
        wait_until(lambda: pages_in_use(server) > 0, 10, "items under way")
        asking.join()
        wait_until(lambda: pages_in_use(server) == 0, 10, "pages back")
        assert server.metrics()[CACHED] <= PREFIX // PAGE
        assert server.metrics()["headrace_integrity_errors"] == 0
