"""Prefixes from siblings: equal text, what is cached, and what becomes of requests and pages when one dies."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, running, serving, wait_until
from tests.e2e.models import SIZES

PAGE = 32
MODEL = (
    "--model",
    f"{SIZES},us_per_token=400",
    "--page-size",
    str(PAGE),
    "--kv-pages",
    "256",
    "--max-model-len",
    "4096",
)
PROMPT = [7 + index % 900 for index in range(1000)]


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *flags: str, port: int = 0) -> Server:
    server = stack.enter_context(closing(Server(*MODEL, *flags, port=port)))
    return stack.enter_context(running(server))


def dropped(server: Server, prompt: list[int], **more: Any) -> dict[str, Any]:
    """Have a server compute a prompt whose KV nobody fetches."""
    body = {"prompt_token_ids": prompt, "handoff": "none", "temperature": 0, **more}
    answer = server.post("/v1/prefill", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def completed(server: Server, prompt: list[int], tokens: int = 8) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def bits(server: Server, prompt: list[int]) -> Any:
    """Text, token ids and logprobs of a greedy answer."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 5, "return_token_ids": True}
    found = server.post("/v1/completions", body).json()["choices"][0]
    return found["text"], found["token_ids"], found["logprobs"]


def sibling_up(server: Server) -> bool:
    return server.metrics().get("headrace_prefill_servers_up", 0) == 1


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_behind_a_prefix_from_a_sibling_are_the_bits_of_computing(servers: ExitStack, dtype: str) -> None:
    flags = ("--max-model-len", "2048", "--kv-pages", "256", "--page-size", "16", "--dtype", dtype)
    prompt, other = list(gold.story_ids()[:600]), list(gold.story_ids()[700:900])
    alone = servers.enter_context(serving("--no-prefix-cache", "--chunk-tokens", "64", *flags))
    expected = bits(alone, prompt)
    first = servers.enter_context(serving("--role", "prefill", *flags))
    second = servers.enter_context(serving("--role", "prefill", "--sibling", first.url, *flags))
    decode = servers.enter_context(serving("--role", "decode", "--prefill", second.url, *flags))
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    dropped(first, prompt)
    dropped(second, other)  # it knows what computing takes
    assert bits(decode, prompt) == expected
    assert second.metrics()['headrace_prefix_fetched_tokens_total{source="sibling"}'] == 592


@pytest.mark.full
def test_a_prefix_comes_from_a_sibling_and_the_text_is_equal(servers: ExitStack) -> None:
    first = start(servers, "--role", "prefill")
    second = start(servers, "--role", "prefill", "--sibling", first.url)
    decode = start(servers, "--role", "decode", "--prefill", second.url)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    before = dropped(first, PROMPT)
    assert dropped(second, [3, *PROMPT[:200]])["usage"]["cached_tokens"] == 0  # it knows what computing takes
    found = completed(decode, [*PROMPT, 5])
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // PAGE * PAGE
    metrics = second.metrics()
    assert metrics['headrace_prefix_fetches_total{result="fetched",source="sibling"}'] == 1
    assert metrics['headrace_prefix_fetched_tokens_total{source="sibling"}'] == len(PROMPT) // PAGE * PAGE
    alone = completed(start(servers), [*PROMPT, 5])
    assert found["choices"][0]["text"] == alone["choices"][0]["text"]
    assert dropped(second, PROMPT)["first_token"] == before["first_token"]
    assert pages_in_use(first) == pages_in_use(second) == 0


@pytest.mark.full
def test_a_sibling_that_is_dead_costs_no_request(servers: ExitStack) -> None:
    first = servers.enter_context(closing(Server(*MODEL, "--role", "prefill"))).started()
    second = start(servers, "--role", "prefill", "--sibling", first.url)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    dropped(first, PROMPT)
    first.kill()
    assert dropped(second, PROMPT)["usage"]["cached_tokens"] == 0
    assert pages_in_use(second) == 0


def test_cached_only_hands_over_or_says_how_much_there_is(servers: ExitStack) -> None:
    prefill = start(servers, "--role", "prefill")
    dropped(prefill, PROMPT[:100])
    held = prefill.post("/v1/prefixes", {"prompt_token_ids": PROMPT})
    assert held.json() == {"cached_tokens": 96}
    body = {"prompt_token_ids": PROMPT[:128], "ticket": "t", "cached_only": True}
    answer = prefill.post("/v1/prefill", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (412, "not_cached")
    assert "96 of the 128 tokens" in answer.json()["error"]["message"]


def fetching(server: Server) -> bool:
    return server.metrics()['headrace_queue_requests{queue="fetching"}'] == 1


def slow(us_per_token: int) -> tuple[str, str]:
    return "--model", f"{SIZES},us_per_token={us_per_token}"


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False])
def test_a_sibling_that_falls_silent_or_dies_in_the_middle_costs_no_request(servers: ExitStack, killed: bool) -> None:
    first = servers.enter_context(closing(Server(*MODEL, *slow(3000), "--role", "prefill"))).started()
    second = start(servers, *slow(3000), "--role", "prefill", "--sibling", first.url)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    before = dropped(first, PROMPT)
    dropped(second, [3, *PROMPT[:100]])
    stage = first.child("headrace.engine.stage")
    stage.suspend()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(dropped, second, PROMPT)
        wait_until(lambda: fetching(second), 10, "the fetch has begun")
        if killed:
            first.kill()
        found = answer.result()
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (before["first_token"], 0)
    result = "failed" if killed else "late"
    assert second.metrics()[f'headrace_prefix_fetches_total{{result="{result}",source="sibling"}}'] == 1
    if not killed:
        stage.resume()
        assert first.end() == 0
    wait_until(lambda: pages_in_use(second) == 0, 20, "pages are back")
