"""A prompt that is computed first and fetched later, by a peer that speaks the protocol by hand."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.core.types.kv.geometry import Geometry
from headrace.transfer.protocol import metadata
from headrace.transfer.protocol.messages import Cancelled, Failed, Finished
from tests.e2e import gold
from tests.e2e.harness import Server, pages_in_use, serving
from tests.e2e.peer import Peer, joined

LEASE_S = 3.0
FLAGS = (
    "--role", "prefill", "--dtype", "float32", "--chunk-tokens", "64", "--kv-pages", "256", "--max-model-len", "2048",
    "--no-prefix-cache", "--hold-lease", str(LEASE_S), "--peer-timeout", "60", "--pp", "2",
)  # fmt: skip
SMOLLM2 = Geometry("float32", layers=30, kv_heads=3, head_dim=64, page_size=32)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS) as made:
        yield made


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    with joined(server, SMOLLM2) as made:
        yield made


def prompt(length: int) -> tuple[int, ...]:
    return gold.story_ids()[:length]


def post(server: Server, ticket: str, length: int, **more: Any) -> httpx.Response:
    body = {"prompt_token_ids": prompt(length), "ticket": ticket, "rid": ticket, "temperature": 0, **more}
    return server.post("/v1/prefill", body)


def hold(server: Server, ticket: str, length: int, **more: Any) -> dict[str, Any]:
    answer = post(server, ticket, length, handoff="hold", **more)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_what_is_fetched_later_is_what_is_pushed(server: Server, peer: Peer) -> None:
    length = 300
    with ThreadPoolExecutor(1) as pool:
        pushing = pool.submit(post, server, "pushed", length)
        peer.reserve("pushed", length)
        pushed, first = peer.receive(length)
        assert pushing.result().json()["handoff"]["chunks"] > 1
    answer = hold(server, "held", length)
    assert (answer["lease_s"], answer["usage"]["prompt_tokens"]) == (LEASE_S, length)
    assert pages_in_use(server) > 0
    peer.reserve("held", length, wait=False)
    fetched, fetched_first = peer.receive(length)
    assert np.array_equal(fetched, pushed)
    assert (fetched_first, answer["first_token"]["id"]) == (first, first.token)
    assert first.token == gold.greedy(prompt(length), 1)[0]


def test_heartbeats_keep_it_and_silence_ends_it(server: Server, peer: Peer) -> None:
    hold(server, "kept", 20)
    hold(server, "forgotten", 20)
    while server.metrics()["headrace_leases_expired_total"] == 0:
        peer.ping("kept")
        time.sleep(LEASE_S / 10)
    failed = peer.answer("forgotten", 20)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.status) == ("lease_expired", 504)
    peer.reserve("kept", 20, wait=False)
    assert peer.receive(20)[0].shape[3] == 20
    assert server.metrics()["headrace_leases_expired_total"] == 1


def test_the_peer_and_the_client_let_go(server: Server, peer: Peer) -> None:
    hold(server, "one", 20)
    hold(server, "two", 20)
    assert peer.cancel("one") == Cancelled(ticket="one", generation=0)
    assert server.request("DELETE", "/v1/prefill/two").status_code == 200
    for ticket in ("one", "two"):
        failed = peer.answer(ticket, 20)
        assert isinstance(failed, Failed)
        assert failed.code == "cancelled"


def test_a_first_token_that_is_all_and_a_ticket_that_is_unknown(server: Server, peer: Peer) -> None:
    answer = hold(server, "short", 20, max_tokens=1)
    assert (answer["finish_reason"], answer["lease_s"]) == ("length", 0)
    finished = peer.answer("short", 20)
    assert isinstance(finished, Finished)
    assert metadata.decode(finished.metadata).first.token == answer["first_token"]["id"]
    unknown = peer.answer("unknown", 20)
    assert isinstance(unknown, Failed)
    assert (unknown.code, unknown.status) == ("unknown_ticket", 404)
