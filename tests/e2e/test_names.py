"""A pair with a router between: one ticket under three names, with the router played by hand."""

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pages_in_use, pair, serving, wait_until

WAIT_S = 4.0  # for the other half; one that is told of a refusal does not wait it out
MODEL = ("--model", "stub:layers=4,hidden=32", "--max-model-len", "1024", "--bootstrap-timeout", str(WAIT_S))
NIXL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_port": None}
PROMPTS: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "one"},
        {"prompt": "a long story " * 20},
        {"prompt": "one token is all", "max_tokens": 1},
        {"prompt": ["first", "second one " * 9], "n": 2},
    ],
    "/v1/chat/completions": [{"messages": [{"role": "user", "content": "hello"}]}],
    "/v1/responses": [{"input": "hello", "instructions": "be brief", "max_output_tokens": 8}],
    "/generate": [{"text": "one"}, {"text": ["first", "second"], "sampling_params": {"n": 2, "temperature": 0}}],
}
CASES = [(path, body) for path, bodies in PROMPTS.items() for body in bodies]


class Pair:
    """The two servers, and what a router does with them."""

    def __init__(self, prefill: Server, decode: Server, bootstrap_port: int) -> None:
        self.prefill, self.decode, self.bootstrap_port = prefill, decode, bootstrap_port
        self.pool = ThreadPoolExecutor(4)

    def room(self, jobs: int = 1) -> dict[str, Any]:
        rooms = [secrets.randbits(63) for _ in range(jobs)]
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": rooms if jobs > 1 else rooms[0],
        }

    def first(self, path: str, body: dict[str, Any], **params: Any) -> dict[str, Any]:
        """Ask the prefill server first, as vLLM's routers do, and return its kv_transfer_params, if there are any."""
        asked = {**body, "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": {**NIXL, **params}}
        answer = ok(self.prefill.post(path, asked))
        return dict(answer.get("kv_transfer_params", {})) if isinstance(answer, dict) else {}

    def both(self, path: str, body: dict[str, Any]) -> tuple[Future[httpx.Response], Future[httpx.Response]]:
        """Ask both at once, as SGLang's routers do."""
        return self.pool.submit(self.prefill.post, path, body), self.pool.submit(self.decode.post, path, body)

    def posted(self) -> float:
        """Prompts that the decode server has posted to the prefill server by itself."""
        return self.prefill.metrics().get('headrace_http_requests_total{route="/v1/prefill",status="200"}', 0.0)

    def quiet(self) -> None:
        for server in (self.prefill, self.decode):
            wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    port = free_port()
    with pair((*MODEL, "--bootstrap-port", str(port)), MODEL) as (prefill, decode):
        yield Pair(prefill, decode, port)


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    """The texts of an answer in any of the forms."""
    if "output" in answer:
        return [item["content"][0]["text"] for item in answer["output"]]
    if isinstance(answer, list):
        return [one["text"] for one in answer]
    if "choices" not in answer:
        return [answer["text"]]
    return [choice.get("text") or choice["message"]["content"] for choice in answer["choices"]]


def greedy(path: str, body: dict[str, Any]) -> dict[str, Any]:
    defaults = {"sampling_params": {"temperature": 0}} if path == "/generate" else {"temperature": 0, "max_tokens": 8}
    return {**defaults, **body}


@pytest.mark.parametrize(("path", "body"), CASES)
def test_texts_are_the_same_under_every_name(servers: Pair, path: str, body: dict[str, Any]) -> None:
    body = greedy(path, body)
    expected = texts(ok(servers.decode.post(path, body)))
    posted = servers.posted()
    several = isinstance(body.get("text"), list)
    if not several:  # such an answer has no place for the names
        params = servers.first(path, body)
        assert texts(ok(servers.decode.post(path, {**body, "kv_transfer_params": params}))) == expected
    transfer = f"xfer-{secrets.token_hex(8)}"
    if not several:
        servers.first(path, body, transfer_id=transfer)
        address = f"http://127.0.0.1:{servers.bootstrap_port}"
        engine = ok(httpx.get(f"{address}/query"))["0"]["engine_id"]
        params = {"do_remote_prefill": True, "transfer_id": transfer, "remote_bootstrap_addr": address}
        params["remote_engine_id"] = engine
        assert texts(ok(servers.decode.post(path, {**body, "kv_transfer_params": params}))) == expected
    for rooms in (1, len(expected)):
        first, second = servers.both(path, {**body, **servers.room(rooms)})
        assert texts(ok(second.result())) == expected
        assert len(texts(ok(first.result()))) == len(expected)
    assert servers.posted() == posted, "only the router posts"
    servers.quiet()


def test_a_stream_under_every_name(servers: Pair) -> None:
    body = {"prompt": "a stream of tokens", "max_tokens": 8, "temperature": 0, "stream": True}
    expected = servers.decode.post("/v1/completions", body).text.count('"text"')
    params = servers.first("/v1/completions", {**body, "stream": False})
    held = servers.decode.post("/v1/completions", {**body, "kv_transfer_params": params})
    first, second = servers.both("/v1/completions", {**body, **servers.room()})
    for response in (held, second.result()):
        assert (response.status_code, response.text.count('"text"')) == (200, expected)
        assert response.text.endswith("data: [DONE]\n\n")
    assert len(ok(first.result())["choices"]) == 1, "a prefill server has one token, which is no stream"


def test_a_refused_prefill_fails_the_decode_that_waits(servers: Pair) -> None:
    room = servers.room()
    waiting = servers.pool.submit(servers.decode.post, "/v1/completions", {"prompt": "x", **room})
    wait_until(lambda: servers.prefill.metrics()["headrace_reservations_waiting"] == 1, 10, "it has reserved")
    started = time.monotonic()
    refused = servers.prefill.post("/v1/completions", {"prompt": "x", "temperature": 9, **room})
    told = waiting.result()
    assert time.monotonic() - started < WAIT_S
    assert (refused.status_code, told.status_code) == (400, 400)
    assert told.json()["error"]["message"] == refused.json()["error"]["message"]


def test_a_refused_prefill_is_remembered_for_a_decode_that_comes_later(servers: Pair) -> None:
    room = servers.room()
    assert servers.prefill.post("/v1/completions", {"prompt": "x", "temperature": 9, **room}).status_code == 400
    started = time.monotonic()
    told = servers.decode.post("/v1/completions", {"prompt": "x", **room})
    assert (told.status_code, time.monotonic() - started < WAIT_S) == (400, True)
    assert "temperature" in told.text


@pytest.mark.parametrize("early", [True, False])
def test_a_refused_decode_fails_the_prefill_that_waits(servers: Pair, early: bool) -> None:
    room = servers.room()
    started = time.monotonic()
    if early:
        refused = servers.decode.post("/v1/completions", {"prompt": "x", "temperature": 9, **room})
        told = servers.prefill.post("/v1/completions", {"prompt": "x", "max_tokens": 4, **room})
    else:
        body = {"prompt": "x", "max_tokens": 4, **room}
        waiting = servers.pool.submit(servers.prefill.post, "/v1/completions", body)
        queue = 'headrace_queue_requests{queue="bootstrap"}'
        wait_until(lambda: servers.prefill.metrics()[queue] == 1, 10, "it waits for its peer")
        started = time.monotonic()
        refused = servers.decode.post("/v1/completions", {"prompt": "x", "temperature": 9, **room})
        told = waiting.result()
    assert time.monotonic() - started < WAIT_S
    assert (refused.status_code, told.status_code) == (400, 499)
    assert "temperature" in told.text


def test_an_unknown_ticket_is_answered_at_once(servers: Pair) -> None:
    params = servers.first("/v1/completions", {"prompt": "x"})
    ask = {"prompt": "x", "max_tokens": 4, "temperature": 0, "kv_transfer_params": params}
    ok(servers.decode.post("/v1/completions", ask))
    started = time.monotonic()
    for ticket in ("nobody", params["ticket"]):
        again = {**ask, "kv_transfer_params": {**params, "tickets": [ticket]}}
        response = servers.decode.post("/v1/completions", again)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "unknown_ticket"), response.text
    assert time.monotonic() - started < WAIT_S


def test_a_wait_for_the_other_half_ends(servers: Pair) -> None:
    started = time.monotonic()
    body = {"prompt": "x", "max_tokens": 4}
    decoding = servers.pool.submit(servers.decode.post, "/v1/completions", {**body, **servers.room()})
    computing = servers.prefill.post("/v1/completions", {**body, **servers.room()})
    answers = (computing, decoding.result())
    assert WAIT_S <= time.monotonic() - started < 3 * WAIT_S
    assert [answer.status_code for answer in answers] == [504, 504]
    assert answers[1].headers["Retry-After"] == "1"
    assert [answer.json()["error"]["code"] for answer in answers] == ["no_peer", "no_request"]
    servers.quiet()


def test_kv_of_another_prompt_is_refused(servers: Pair) -> None:
    room = servers.room()
    first = servers.pool.submit(servers.prefill.post, "/v1/completions", {"prompt": "abc", "max_tokens": 4, **room})
    second = servers.decode.post("/v1/completions", {"prompt": "abd", "max_tokens": 4, **room})
    for response in (first.result(), second):
        assert (response.status_code, response.json()["error"]["code"]) == (502, "bad_reservation")
        assert "another prompt" in response.text
    servers.quiet()


def test_requests_cannot_name_strangers_unless_they_are_allowed(servers: Pair) -> None:
    params = servers.first("/v1/completions", {"prompt": "x"})
    elsewhere = {**params, "remote_host": "127.0.0.9", "remote_engine_id": ""}
    refused = servers.decode.post("/v1/completions", {"prompt": "x", "kv_transfer_params": elsewhere})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "prefill_not_allowed")
    body = {"prompt": "x", "max_tokens": 8, "temperature": 0}
    expected = texts(ok(servers.decode.post("/v1/completions", body)))
    with serving(*MODEL, "--role", "decode", "--allow-prefill", "127.0.0.1") as other:
        held = ok(other.post("/v1/completions", {**body, "kv_transfer_params": params}))
        asked = {**body, **servers.room()}
        first = servers.pool.submit(servers.prefill.post, "/v1/completions", asked)
        assert texts(held) == texts(ok(other.post("/v1/completions", asked))) == expected
        ok(first.result())
    servers.quiet()
