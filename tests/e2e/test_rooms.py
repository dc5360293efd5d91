"""Requests that wait for pages of a small decode server for longer than --bootstrap-timeout, in every flow."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import pair
from tests.e2e.test_names import Pair, ok

pytestmark = pytest.mark.full

ROOMS = 10
PREFILL = ("--model", "stub:layers=4,hidden=32", "--bootstrap-timeout", "5")
# Two requests at a time, each for some 1.6 s: the last one waits for more than 6 s.
DECODE = ("--model", "stub:layers=4,hidden=32,us_per_token=40000", "--kv-pages", "8")
LENGTH = ("--max-model-len", "64")
BODY = {"prompt": "a prompt of one page", "max_tokens": 20, "min_tokens": 20, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    port = free_port()
    with pair((*PREFILL, *LENGTH, "--bootstrap-port", str(port)), (*DECODE, *LENGTH)) as (prefill, decode):
        yield Pair(prefill, decode, port)


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {**BODY, "prompt": f"{number} {BODY['prompt']}", **fields}


def check(answers: list[Any]) -> None:
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * ROOMS


def test_ten_rooms_of_a_router(servers: Pair) -> None:
    """And an eleventh, of which the decode server never hears, does not wait for them."""
    with ThreadPoolExecutor(2 * ROOMS + 1) as pool:
        unknown = pool.submit(servers.prefill.post, "/v1/completions", body(99, **servers.room()))
        bodies = [body(number, **servers.room()) for number in range(ROOMS)]
        prefills = [pool.submit(servers.prefill.post, "/v1/completions", one) for one in bodies]
        decodes = [pool.submit(servers.decode.post, "/v1/completions", one) for one in bodies]
        check([ok(answer.result()) for answer in decodes])
        assert [answer.result().status_code for answer in prefills] == [200] * ROOMS
        refused = unknown.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "no_peer")
    servers.quiet()


def test_ten_requests_of_our_own_flow(servers: Pair) -> None:
    with ThreadPoolExecutor(ROOMS) as pool:
        check([ok(answer) for answer in pool.map(lambda number: servers.decode.post("/v1/completions", body(number)),
                                                 range(ROOMS))])  # fmt: skip
    servers.quiet()
