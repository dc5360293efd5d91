"""KV that comes back: after a turn, the prefill server has the answer that the decode server generated."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, running, serving, wait_until
from tests.e2e.models import SIZES

PAGE = 16
MODEL = (
    "--model", f"{SIZES},us_per_token=400", "--page-size", str(PAGE), "--kv-pages", "256", "--max-model-len", "4096",
)  # fmt: skip
PROMPT = [7 + index % 900 for index in range(500)]
ANSWER = 70
SLOW = ("--model", f"{SIZES},us_per_token=2000")  # computing is worth a transfer on a machine that is busy, too


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
    alone = turn(decode, prompt, cache_salt="nothing of it is cached")
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


def bits(server: Server, prompt: Sequence[int], tokens: int) -> Any:
    """Text, token ids and logprobs of a greedy answer."""
    found = turn(server, list(prompt), tokens, logprobs=5)["choices"][0]
    return found["text"], found["token_ids"], found["logprobs"]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_turn_two_has_the_same_bits_as_computed(servers: ExitStack, dtype: str) -> None:
    flags = ("--max-model-len", "2048", "--kv-pages", "256", "--page-size", "16", "--dtype", dtype)
    prefill = servers.enter_context(serving("--role", "prefill", "--accept-return", "127.0.0.1", *flags))
    decode = servers.enter_context(serving("--role", "decode", "--prefill", prefill.url, "--kv-return", *flags))
    alone = servers.enter_context(serving("--no-prefix-cache", "--chunk-tokens", "64", *flags))
    first = gold.story_ids()[:200]
    answer = bits(decode, first, 40)
    returned(decode)
    prompt = [*first, *answer[1], *gold.story_ids()[300:320]]
    second = turn(decode, prompt, 8, logprobs=5)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 224
    assert answer == bits(alone, first, 40)
    assert bits(decode, prompt, 8) == bits(alone, prompt, 8)


def taking(prefill: Server) -> bool:
    return prefill.metrics()['headrace_queue_requests{queue="fetching"}'] > 0


TRIES = 5  # on a loaded machine an answer may not come within the quarter of a second that an offer waits


def comes_back(prefill: Server, decode: Server, run: Callable[[], Any]) -> bool:
    """Run a turn; whether what is offered of it comes back. One that was computed at the decode server is not."""
    taken = count(decode, "taken")
    run()
    patience = time.monotonic() + 3
    while time.monotonic() < patience:
        if count(decode, "taken") > taken or taking(prefill):
            return True
        time.sleep(0.02)
    return False


def stopped_while_generating(decode: Server, stage: Any, prompt: list[int]) -> None:
    """A turn, at whose end the stage of the prefill server is stopped: not for long, or offers are refused for a while,
    since the server is not ready."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(turn, decode, prompt, 100)
        generating = 'headrace_queue_requests{queue="generating"}'
        wait_until(lambda: decode.metrics()[generating] == 1, 10, "tokens are generated")
        stage.suspend()
        assert answer.result()["usage"]["completion_tokens"] == 100


@pytest.fixture
def held_up(servers: ExitStack) -> Iterator[tuple[Server, Server]]:
    """A pair between which KV is coming back, and does not get on: the prefill server's stage is stopped."""
    prefill = servers.enter_context(
        closing(Server(*MODEL, *SLOW, "--role", "prefill", "--accept-return", "127.0.0.1"))
    ).started()
    flags = ("--role", "decode", "--prefill", prefill.url, "--kv-return", "--fallback", "local")
    decode = servers.enter_context(closing(Server(*MODEL, *SLOW, *flags))).started()
    stage = prefill.child("headrace.engine.stage")
    prompts = [[number, *PROMPT] for number in range(2 * TRIES)]
    while not comes_back(prefill, decode, lambda: turn(decode, prompts.pop())):
        pass
    wait_until(lambda: not taking(prefill), 10, "the first turn has come back")
    while not comes_back(prefill, decode, lambda: stopped_while_generating(decode, stage, prompts.pop())):
        stage.resume()
    wait_until(lambda: taking(prefill), 10, "the turn is coming back")
    yield prefill, decode
    for server in (prefill, decode):
        if server.process.poll() is None:
            server.kill()


@pytest.mark.full
def test_the_decode_server_dies_while_it_returns_kv(held_up: tuple[Server, Server]) -> None:
    prefill, decode = held_up
    stage = prefill.child("headrace.engine.stage")
    decode.kill()
    stage.resume()
    wait_until(lambda: not taking(prefill) and pages_in_use(prefill) == 0, 30, "pages are back")
    body = {"prompt_token_ids": PROMPT, "handoff": "none", "temperature": 0}
    assert prefill.post("/v1/prefill", body).status_code == 200
    assert prefill.end() == 0


@pytest.mark.full
def test_the_prefill_server_dies_while_it_takes_kv(held_up: tuple[Server, Server]) -> None:
    prefill, decode = held_up
    prefill.kill()
    wait_until(lambda: pages_in_use(decode) == 0, 30, "pages are back")
    assert turn(decode, [5, *PROMPT], 4)["usage"]["completion_tokens"] == 4
    assert decode.end() == 0


@pytest.mark.full
def test_the_stage_that_takes_kv_stops_for_a_moment(held_up: tuple[Server, Server]) -> None:
    prefill, decode = held_up
    prefill.child("headrace.engine.stage").resume()
    wait_until(lambda: pages_in_use(decode) == pages_in_use(prefill) == 0, 30, "pages are back")
    assert prefill.end() == decode.end() == 0
