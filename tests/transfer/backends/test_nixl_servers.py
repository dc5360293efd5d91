"""A prefill server and a decode server with NIXL between them: texts, and pages when one dies or cancels."""

import json
import select
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from headrace.core.types.kv.backends import NIXL
from tests.e2e.harness import Server, pages_in_use, pair, running, wait_until
from tests.e2e.models import NAME, SIZES, StubOracle

pytestmark = pytest.mark.nixl

FLAGS = (
    *("--model", f"{SIZES},us_per_token=1000", "--served-model-name", NAME, "--chunk-tokens", "128"),
    *("--kv-pages", "1024", "--threads", "1", "--peer-timeout", "1", "--transfer-backends", NIXL),
)
TEXT = "a long prompt of which a part is on its way when something goes wrong " * 60
PROMPTS = [TEXT[:length] for length in (1, 15, 16, 17, 300, 1700)]
TOKENS = 8


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What one runner says alone after the prompts."""
    oracle = StubOracle(SIZES, 2000)
    return {prompt: oracle.greedy_text(list(prompt.encode()), TOKENS) for prompt in PROMPTS}


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    with pair(FLAGS, (*FLAGS, "--page-size", "64")) as made:
        yield made


def body(prompt: str) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}


def check(decode: Server, texts: dict[str, str]) -> None:
    answers = {prompt: decode.post("/v1/completions", body(prompt)).json() for prompt in texts}
    assert {prompt: answer["choices"][0]["text"] for prompt, answer in answers.items()} == texts


def written(server: Server, backend: str = NIXL) -> float:
    """Bytes that this prefill server has sent by a backend."""
    return server.metrics().get(f'headrace_bytes_sent_total{{backend="{backend}"}}', 0.0)


def give_back(server: Server) -> None:
    wait_until(lambda: pages_in_use(server) == 0, 10, f"pages are back\n{server.log}")


def begun(prefill: Server, decode: Server, prompt: str) -> HTTPConnection:
    """A request of which some chunks are written and some are not even computed."""
    before = written(prefill)
    asking = HTTPConnection("127.0.0.1", decode.port)
    asking.request("POST", "/v1/completions", json.dumps(body(prompt)), {"Content-Type": "application/json"})
    wait_until(lambda: written(prefill) > before, 20, f"KV is on its way\n{prefill.log}")
    assert not select.select([asking.sock], [], [], 0)[0], "it is not answered yet"
    return asking


def test_texts_are_those_of_one_runner_alone(servers: tuple[Server, Server], texts: dict[str, str]) -> None:
    prefill, decode = servers
    check(decode, texts)
    wait_until(lambda: written(prefill) > 0, 10, "stages tell what they have sent with heartbeats")
    assert written(prefill, "zmq") == written(prefill, "shm") == 0
    for server in servers:
        give_back(server)


def test_a_cancelled_request_returns_its_pages(servers: tuple[Server, Server], texts: dict[str, str]) -> None:
    prefill, decode = servers
    for number in range(3):
        begun(prefill, decode, f"{number} {TEXT}").close()
        for server in servers:
            give_back(server)
    check(decode, texts)


def test_a_killed_prefill_server_gives_the_pages_back(texts: dict[str, str]) -> None:
    """In the middle of a request; the next one in its place is as good."""
    with (
        closing(Server("--role", "prefill", *FLAGS)) as prefill,
        running(Server("--role", "decode", "--prefill", prefill.url, *FLAGS)) as decode,
    ):
        prefill.started()
        with closing(begun(prefill, decode, TEXT)) as asking:
            prefill.kill()
            assert asking.getresponse().status in (502, 503)
        give_back(decode)
        assert decode.metrics()["headrace_quarantined_pages"] == 0, "no confirmation is needed"
        with running(Server("--role", "prefill", *FLAGS, port=prefill.port)):
            served = lambda: decode.post("/v1/completions", body("x")).status_code == 200  # noqa: E731
            wait_until(served, 30, f"they meet again\n{decode.log}")
            check(decode, texts)
