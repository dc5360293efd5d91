"""Prefixes from siblings: equal text, what is cached, and what becomes of requests and pages when one dies."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import msgspec
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


def struck(first: Server, second: Server, ask: Callable[[], dict[str, Any]], *, killed: bool) -> dict[str, Any]:
    """What a server answers whose sibling falls silent when it is fetched from, and is killed then or not."""
    first.child("headrace.engine.stage").suspend()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        wait_until(lambda: fetching(second), 10, "the fetch has begun")
        if killed:
            first.kill()
        return answer.result()


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False])
def test_a_sibling_that_falls_silent_or_dies_in_the_middle_costs_no_request(servers: ExitStack, killed: bool) -> None:
    first = servers.enter_context(closing(Server(*MODEL, *slow(3000), "--role", "prefill"))).started()
    second = start(servers, *slow(3000), "--role", "prefill", "--sibling", first.url)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    before = dropped(first, PROMPT)
    dropped(second, [3, *PROMPT[:100]])
    found = struck(first, second, lambda: dropped(second, PROMPT), killed=killed)
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (before["first_token"], 0)
    result = "failed" if killed else "late"
    assert second.metrics()[f'headrace_prefix_fetches_total{{result="{result}",source="sibling"}}'] == 1
    if not killed:
        first.child("headrace.engine.stage").resume()
        assert first.end() == 0
    wait_until(lambda: pages_in_use(second) == 0, 20, "pages are back")


RETAIN = ("--retain-percent", "50")
NOT_HERE = "the cache has no whole page of it"
NOT_COME = f"{NOT_HERE}; a sibling has more of it, which did not come"


def prefetched(server: Server, prompt: list[int]) -> dict[str, Any]:
    """What a server grants of a prefetch."""
    action = {"action_id": "a", "action_type": "prefetch", "action_version": "1", "payload": {"seconds": 600}}
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    answer = server.post("/v1/kv_hints", {"prompt_token_ids": prompt, "kv_hints": hints})
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["kv_hints"][0])


@pytest.mark.full
def test_a_prefetch_brings_what_a_sibling_has_and_computes_nothing(servers: ExitStack) -> None:
    first = start(servers, "--role", "prefill")
    second = start(servers, "--role", "prefill", "--sibling", first.url, *RETAIN)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    before = dropped(first, PROMPT)
    dropped(second, [3, *PROMPT[:200]])  # it knows what computing takes
    computed = second.metrics()["headrace_prompt_tokens_total"]
    assert not prefetched(second, [9, *PROMPT])["granted"], "nobody has it"
    for _ in range(2):
        granted = prefetched(second, PROMPT)
        assert (granted["granted"], granted["tokens"], granted["seconds"]) == (True, 992, 600.0)
    metrics = second.metrics()
    assert metrics["headrace_prompt_tokens_total"] == computed
    assert metrics["headrace_retained_pages"] == 992 // PAGE
    found = dropped(second, PROMPT)
    assert (found["first_token"], found["usage"]["cached_tokens"]) == (before["first_token"], 992)
    assert second.metrics()['headrace_prefix_fetches_total{result="fetched",source="sibling"}'] == 1
    assert pages_in_use(first) == pages_in_use(second) == 0


@pytest.mark.full
def test_a_prefetch_fetches_what_its_tenant_may_retain_and_the_tiers_lack(servers: ExitStack) -> None:
    first = start(servers, "--role", "prefill")
    flags = ("--retain-percent", "10", "--host-pages", "100")  # 25 pages
    second = start(servers, "--role", "prefill", "--sibling", first.url, *flags)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    demote = [{"action_id": "d", "action_type": "demote", "action_version": "1"}]
    hints = {"protocol_version": "1", "message_id": "m", "actions": demote}
    assert dropped(second, PROMPT[:640], kv_hints=hints)["kv_hints"][0]["tokens"] == 640
    in_host = 'headrace_kv_tier_pages{state="used",tier="host"}'
    wait_until(lambda: second.metrics().get(in_host) == 20, 20, "it is in the host tier")
    dropped(first, PROMPT)
    assert prefetched(second, PROMPT[:640])["tokens"] == 640
    fetches = 'headrace_prefix_fetches_total{result="fetched",source="sibling"}'
    assert second.metrics().get(fetches, 0) == 0, "the tier has as much"
    assert prefetched(second, PROMPT)["tokens"] == 800
    metrics = second.metrics()
    assert (metrics[fetches], metrics["headrace_retained_pages"]) == (1, 25)
    assert dropped(second, PROMPT)["usage"]["cached_tokens"] == 992, "a prompt fetches beyond that bound"


@pytest.mark.full
@pytest.mark.parametrize("killed", [True, False])
def test_a_sibling_that_falls_silent_or_dies_in_a_prefetch(servers: ExitStack, killed: bool) -> None:
    first = servers.enter_context(closing(Server(*MODEL, *slow(3000), "--role", "prefill"))).started()
    second = start(servers, *slow(3000), "--role", "prefill", "--sibling", first.url, *RETAIN)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    before = dropped(first, PROMPT)
    dropped(second, [3, *PROMPT[:100]])
    granted = struck(first, second, lambda: prefetched(second, PROMPT), killed=killed)
    assert (granted["granted"], granted["tokens"], granted["reason"]) == (False, 0, NOT_COME)
    wait_until(lambda: pages_in_use(second) == 0, 20, "pages are back")
    assert second.metrics()["headrace_retained_pages"] == 0
    found = dropped(second, PROMPT)
    assert found["first_token"] == before["first_token"]
    if not killed:
        first.child("headrace.engine.stage").resume()
        assert first.end() == 0


@contextmanager
def lying(server: Server, has: int, *, computes: bool) -> Iterator[str]:
    """The HTTP address of a server which says that it has cached so many tokens, whatever it is asked for. computes:
    what is to come from its cache alone, it computes."""

    class Liar(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(http.get(f"{server.url}{self.path}"))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/prefixes":
                self._answer(httpx.Response(200, json={"cached_tokens": has}))
                return
            if computes:
                body = msgspec.json.encode({**msgspec.json.decode(body), "cached_only": False})
            self._answer(http.post(f"{server.url}{self.path}", content=body))

        def _answer(self, response: httpx.Response) -> None:
            self.send_response(response.status_code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_args: Any) -> None:
            pass

    headers = {"Content-Type": "application/json"}
    with httpx.Client(timeout=30, headers=headers) as http, ThreadingHTTPServer(("127.0.0.1", 0), Liar) as front:
        thread = Thread(target=front.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{front.server_port}"
        finally:
            front.shutdown()
            thread.join()


@pytest.mark.full
@pytest.mark.parametrize("computes", [True, False])
def test_a_sibling_that_lies_of_its_cache_costs_nothing(servers: ExitStack, computes: bool) -> None:
    first = start(servers, "--role", "prefill")
    dropped(first, PROMPT[:100])
    url = servers.enter_context(lying(first, 10**9, computes=computes))
    second = start(servers, "--role", "prefill", "--sibling", url, *RETAIN)
    wait_until(lambda: sibling_up(second), 20, "the sibling is up")
    granted = prefetched(second, PROMPT)
    assert (granted["granted"], granted["tokens"], granted["reason"]) == (False, 0, NOT_COME)
    metrics = second.metrics()
    asked = 1 if computes else 2  # once more for what is left, as if it had been evicted
    assert metrics['headrace_prefix_fetches_total{result="failed",source="sibling"}'] == asked
    assert metrics["headrace_retained_pages"] == 0
    wait_until(lambda: pages_in_use(second) == pages_in_use(first) == 0, 20, "pages are back")
    assert dropped(second, PROMPT)["usage"]["cached_tokens"] == 0, "nothing that it sent is believed"
