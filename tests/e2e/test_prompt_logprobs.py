"""Logprobs of prompts from a pair: below where they start, the prefix cache of the prefill server is used."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Server, pair

MODEL = ("--model", "stub:layers=2,hidden=32", "--max-model-len", "512", "--kv-pages", "64", "--chunk-tokens", "48")
PAGE = 16
LENGTH = 200


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    with pair(MODEL, MODEL) as (prefill, decode):
        yield prefill, decode


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=LENGTH)


def answer(decode: Server, path: str, body: dict[str, Any]) -> Any:
    response = decode.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_they_start_where_asked_and_are_those_of_a_whole_run(servers: tuple[Server, Server]) -> None:
    """Starts at and beside edges of pages and of chunks. The stub's logprobs follow from all of the KV before them."""
    prefill, decode = servers
    ids = prompt(1)
    body = {"prompt": ids, "max_tokens": 2, "prompt_logprobs": 1}
    whole = answer(decode, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
    assert [entry and entry["id"] for entry in whole] == [None, *ids[1:]]
    for start in (0, 1, 2, PAGE, PAGE + 1, 48, 49, 97, LENGTH - 1, LENGTH):
        before = prefill.total("headrace_cached_tokens_total")
        (choice,) = answer(decode, "/v1/completions", {**body, "prompt_logprobs_start": start})["choices"]
        cached = prefill.total("headrace_cached_tokens_total") - before
        assert cached == max(0, start - 1) // PAGE * PAGE
        expected = [None] * start + whole[start:]
        assert choice.get("prompt_logprobs", [None] * LENGTH) == expected


def test_in_the_form_of_sglang(servers: tuple[Server, Server]) -> None:
    prefill, decode = servers
    ids = prompt(2)
    body = {"input_ids": ids, "return_logprob": True, "sampling_params": {"max_new_tokens": 2}}
    whole = answer(decode, "/generate", {**body, "logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in whole] == ids
    for start in (1, PAGE, PAGE + 1, LENGTH - 1):
        before = prefill.total("headrace_cached_tokens_total")
        about = answer(decode, "/generate", {**body, "logprob_start_len": start})["meta_info"]
        assert about["input_token_logprobs"] == [[None, ids[start], None], *whole[start + 1 :]]
        assert prefill.total("headrace_cached_tokens_total") - before == start // PAGE * PAGE
    refused = decode.post("/generate", {**body, "logprob_start_len": LENGTH})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprob_start_len")
