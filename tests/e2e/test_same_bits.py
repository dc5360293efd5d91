"""The same answers, to the last bit of their logprobs, from servers that chunk, batch, cache and split otherwise."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e import gold
from tests.e2e.harness import Server, pair, serving

LENGTHS = (5, 33, 200, 401)
FLAGS = ("--max-model-len", "2048", "--kv-pages", "512")
TOKENS = 6


def answer(server: Server, prompt: Sequence[int]) -> Any:
    """Text and logprobs of a greedy answer."""
    body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": TOKENS, "temperature": 0, "logprobs": 5}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["logprobs"]


def one_by_one(server: Server) -> list[Any]:
    return [answer(server, gold.story_ids()[:length]) for length in LENGTHS]


def at_once(server: Server) -> list[Any]:
    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        return list(pool.map(lambda length: answer(server, gold.story_ids()[:length]), LENGTHS))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_batches_cached_prefixes_stages_and_handoff_change_no_bit(dtype: str) -> None:
    flags = (*FLAGS, "--dtype", dtype)
    with serving("--role", "colocated", "--chunk-tokens", "64", *flags) as server:
        expected = one_by_one(server)
        assert server.total("headrace_cached_tokens_total") > 0, "prompts begin with each other"
        assert one_by_one(server) == expected, "from the prefix cache"
        assert at_once(server) == expected
    prefill_flags = (*flags, "--chunk-tokens", "256", "--no-prefix-cache", "--pp", "2")
    decode_flags = (*flags, "--page-size", "32", "--chunk-tokens", "128")
    with pair(prefill_flags, decode_flags) as (_, decode):
        assert at_once(decode) == expected, "by two stages, in other chunks, handed over into pages of another size"
