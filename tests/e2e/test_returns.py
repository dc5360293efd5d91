"""KV that comes back: after a turn, the prefill server has the answer that the decode server generated."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.e2e.models import SIZES

PAGE = 16
MODEL = (
    "--model", f"{SIZES},us_per_token=400", "--page-size", str(PAGE), "--kv-pages", "256", "--max-model-len", "4096",
)  # fmt: skip
PROMPT = [7 + index % 900 for index in range(500)]
ANSWER = 70


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, *flags: str) -> Server:
    server = stack.enter_context(closing(Server(*MODEL, *flags)))
    return stack.enter_context(running(server))


def a_pair(stack: ExitStack, *flags: str, taking: tuple[str, ...] = ("--accept-return", "127.0.0.1")) -> list[Server]:
    """A prefill server that takes KV back, and a decode server that offers it. flags: of both."""
    prefill = start(stack, "--role", "prefill", *taking, *flags)
    return [prefill, start(stack, "--role", "decode", "--prefill", prefill.url, "--kv-return", *flags)]


def turn(server: Server, prompt: list[int], tokens: int = ANSWER, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "return_token_ids": True, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def count(server: Server, result: str) -> float:
    return float(server.metrics()[f'headrace_kv_returns_total{{result="{result}"}}'])


def returned(decode: Server, times: int = 1) -> None:
    """The KV of so many turns has come back."""
    wait_until(lambda: count(decode, "taken") == times, 20, f"{times} turns have come back")


def test_turn_two_finds_prompt_and_answer_of_turn_one(servers: ExitStack) -> None:
    prefill, decode = a_pair(servers)
    first = turn(decode, PROMPT)
    answer = first["choices"][0]["token_ids"]
    assert len(answer) == ANSWER
    returned(decode)
    prompt = [*PROMPT, *answer, 11, 12, 13]
    second = turn(decode, prompt)
    whole = (len(PROMPT) + ANSWER - 1) // PAGE * PAGE
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == whole
    alone = turn(start(servers), prompt)
    assert second["choices"][0]["text"] == alone["choices"][0]["text"]
    for server in (prefill, decode):
        metrics = server.metrics()
        assert metrics["headrace_kv_returned_tokens_total"] >= whole - len(PROMPT) // PAGE * PAGE
        assert metrics["headrace_kv_returned_bytes_total"] > 0
    wait_until(lambda: pages_in_use(prefill) == pages_in_use(decode) == 0, 10, "pages are back")


@pytest.mark.full
def test_a_server_that_takes_none_is_asked_once(servers: ExitStack) -> None:
    prefill, decode = a_pair(servers, taking=())
    for number in range(2):
        turn(decode, [number, *PROMPT])
    wait_until(lambda: count(decode, "refused") == 1, 10, "the offer is refused, and none follows")
    answer = prefill.post("/v1/returns", {"prompt_token_ids": PROMPT, "ticket": "t", "control_port": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_role")


@pytest.mark.full
def test_offers_of_who_has_no_session_and_of_other_hosts_are_not_taken(servers: ExitStack) -> None:
    prefill = start(servers, "--role", "prefill", "--accept-return", "127.0.0.1")
    offer = {"prompt_token_ids": PROMPT, "ticket": "t", "control_port": 1}
    assert prefill.post("/v1/returns", offer).json() == {"taken": False, "reason": "no_session", "tokens": 0}
    other = start(servers, "--role", "prefill", "--accept-return", "127.0.0.2")
    decode = start(servers, "--role", "decode", "--prefill", other.url, "--kv-return")
    turn(decode, PROMPT)
    wait_until(lambda: count(decode, "refused") == 1, 10, "its host is not on the list")


@pytest.mark.full
def test_short_answers_are_not_offered_and_tenants_stay_apart(servers: ExitStack) -> None:
    _, decode = a_pair(servers)
    turn(decode, PROMPT, 4)
    answer = turn(decode, PROMPT, cache_salt="one")["choices"][0]["token_ids"]
    returned(decode)
    prompt = [*PROMPT, *answer, 11]
    cached = [turn(decode, prompt, 1, cache_salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
              for salt in ("two", "one")]  # fmt: skip
    assert cached == [0, (len(PROMPT) + ANSWER - 1) // PAGE * PAGE]


@pytest.mark.full
def test_pages_of_different_sizes(servers: ExitStack) -> None:
    prefill = start(servers, "--role", "prefill", "--accept-return", "127.0.0.1", "--page-size", "64")
    decode = start(servers, "--role", "decode", "--prefill", prefill.url, "--kv-return")
    answer = turn(decode, PROMPT)["choices"][0]["token_ids"]
    returned(decode)
    found = turn(decode, [*PROMPT, *answer, 1])["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found >= (len(PROMPT) + ANSWER - 1) // 64 * 64


@pytest.mark.full
def test_a_server_that_ends_right_after_a_turn_leaves_no_page_behind(servers: ExitStack) -> None:
    prefill = start(servers, "--role", "prefill", "--accept-return", "127.0.0.1")
    decode = Server(*MODEL, "--role", "decode", "--prefill", prefill.url, "--kv-return")
    with closing(decode), running(decode):
        turn(decode, PROMPT)
    wait_until(lambda: pages_in_use(prefill) == 0, 10, "pages are back")
    other = start(servers, "--role", "decode", "--prefill", prefill.url)
    assert turn(other, [*PROMPT, 1])["usage"]["completion_tokens"] == ANSWER
