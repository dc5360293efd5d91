"""`headrace gateway --decode-engine sglang`: a router's requests on one side, the scripted decode side on the other."""

import json
import struct
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace.core.types.kv.geometry import ceil_div
from tests.e2e.harness import Server, pages_in_use, running, wait_until
from tests.gateway.sglang_nixl.decode_engine import DecodeEngine
from tests.gateway.sglang_nixl.prefill_side import (
    HOST,
    MODEL,
    POISON,
    arrived,
    bootstrap_port,
    decode_engine,
    tokens,
    untouched,
)
from tests.gateway.sglang_nixl.server_info import InfoServer

pytestmark = pytest.mark.nixl

PAGE = 16
ROOMS = count((1 << 61) + 5, 1000)  # a body with several choices names those that follow, too


@pytest.fixture(scope="module")
def info() -> Iterator[InfoServer]:
    """The engine's HTTP server."""
    with closing(InfoServer()) as made:
        yield made


@pytest.fixture(scope="module")
def gateway(server: Server, info: InfoServer) -> Iterator[tuple[Server, int]]:
    port = bootstrap_port()
    flags = (
        *("--decode", info.url, "--decode-engine", "sglang", "--sglang-page-size", str(PAGE)),
        *("--prefill", server.url, "--bootstrap-port", str(port), "--pool-tokens", "8192"),
    )
    with running(Server(*flags, command="gateway")) as made:
        assert "never on a GPU" in made.log
        yield made, port


@pytest.fixture(scope="module")
def registered(gateway: tuple[Server, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeEngine]:
    with closing(decode_engine(tmp_path_factory.mktemp("decode"), gateway[1], PAGE)) as made:
        made.register()
        yield made


@pytest.fixture
def one(registered: DecodeEngine, server: Server) -> Iterator[DecodeEngine]:
    registered.memory[:] = POISON
    yield registered
    wait_until(lambda: pages_in_use(server) == 0, 20, "all pages of the prefill server are back")


def posted(gateway: tuple[Server, int], path: str, room: int, body: dict[str, Any], timeout_s: float = 30) -> Any:
    """As SGLang's router sends it to both sides."""
    fields = {**body, "bootstrap_host": HOST, "bootstrap_port": gateway[1], "bootstrap_room": room, "stream": True}
    return httpx.post(f"{gateway[0].url}{path}", json=fields, timeout=timeout_s)


PROMPT = tokens(300)
BODIES = {
    "/v1/completions": {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 3},
    "/generate": {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 20, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 3,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_routers_request_leaves_kv_and_first_token_at_the_decode_engine(
    gateway: tuple[Server, int], one: DecodeEngine, reference: Any, path: str
) -> None:
    room = next(ROOMS)
    pages = [int(page) for page in np.random.default_rng(1).permutation(40)[: ceil_div(len(PROMPT), PAGE)]]
    one.order("room", room=room, pages=pages, aux_index=2)
    answer = posted(gateway, path, room, BODIES[path])
    assert answer.status_code == 200, answer.text
    assert "kv_transfer_params" not in answer.json()
    assert one.status(room) == ("4", "")
    expected, loaded = reference(PROMPT)
    np.testing.assert_array_equal(arrived(one, pages, len(PROMPT)), expected)
    assert untouched(one, pages, len(PROMPT))
    assert struct.unpack_from("<i", one.aux(0, 2)) == (loaded.first.token,)
    assert struct.unpack_from("<f", one.aux(2, 2))[0] == pytest.approx(loaded.first.logprob.logprob)
    assert struct.unpack_from("<3i", one.aux(5, 2)) == loaded.first.logprob.top_ids
    assert struct.unpack_from("<Q", one.aux(9, 2)) == (room,)


def test_the_clients_sampling_reaches_the_prefill_server(gateway: tuple[Server, int], one: DecodeEngine) -> None:
    """The decode engine samples no first token, so bias has to work there."""
    room = next(ROOMS)
    body = {"prompt": "a chat", "logit_bias": {"7": 100}, "max_tokens": 5, "model": MODEL}
    one.order("room", room=room, pages=[3], aux_index=0)
    assert posted(gateway, "/v1/completions", room, body).status_code == 200
    assert struct.unpack_from("<i", one.aux(0, 0)) == (7,)


def test_a_chat(gateway: tuple[Server, int], one: DecodeEngine, server: Server, reference: Any) -> None:
    room, messages = next(ROOMS), [{"role": "user", "content": "x" * 50}]
    ids = server.post("/tokenize", {"model": MODEL, "messages": messages}).json()["tokens"]
    pages = list(range(5, 5 + ceil_div(len(ids), PAGE)))
    one.order("room", room=room, pages=pages, aux_index=0)
    answer = posted(gateway, "/v1/chat/completions", room, {"messages": messages, "model": MODEL, "max_tokens": 5})
    assert (answer.status_code, one.status(room)) == (200, ("4", ""))
    np.testing.assert_array_equal(arrived(one, pages, len(ids)), reference(ids)[0])


def test_what_the_prefill_server_refuses_fails_the_room_at_the_decode_engine(
    gateway: tuple[Server, int], one: DecodeEngine
) -> None:
    room = next(ROOMS)
    one.order("room", room=room, pages=[3], aux_index=0)
    answer = posted(gateway, "/v1/completions", room, {"prompt": [1, 2], "nonsense": 1})
    assert answer.status_code == 400
    assert "nonsense" in answer.text
    counted = [
        name for name, value in gateway[0].metrics().items() if name.startswith("headrace_requests_total") and value
    ]
    assert any('outcome="refused"' in name or 'outcome="failed"' in name for name in counted), counted
    status, reason = one.status(room)
    assert status == "0"
    assert "nonsense" in reason
    room = next(ROOMS)
    one.order("room", room=room, pages=[3], aux_index=0)
    answer = posted(gateway, "/v1/completions", room, {"prompt": "x", "n": 2})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert one.status(room) == ("0", answer.json()["error"]["message"])
    assert posted(gateway, "/v1/completions", 0, {"prompt": "x"}).status_code == 400


def test_messages_about_rooms_go_to_the_port_after_the_one_that_engines_ask(gateway: tuple[Server, int]) -> None:
    """So it is the same when the gateway is started again, and notices engines that knew the one before."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    answer = httpx.get(f"http://{HOST}:{gateway[1]}/route", params=dict.fromkeys(names, 0), trust_env=False)
    assert answer.json() == {"rank_ip": HOST, "rank_port": gateway[1] + 1}


def test_any_model_is_taken_for_the_one_that_is_served(gateway: tuple[Server, int], one: DecodeEngine) -> None:
    room = next(ROOMS)
    one.order("room", room=room, pages=list(range(19)), aux_index=0)
    answer = posted(gateway, "/v1/completions", room, {"prompt": PROMPT, "model": "m"})
    assert (answer.status_code, one.status(room)) == (200, ("4", ""))
    answer = posted(gateway, "/v1/completions", next(ROOMS), {"prompt": PROMPT, "model": "m:adapter"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_engine_that_is_started_again_with_other_pages_is_refused(
    gateway: tuple[Server, int], info: InfoServer, one: DecodeEngine, tmp_path: Path
) -> None:
    """Pages of half the size and twice the bytes: their number alone would not tell."""
    info.info["page_size"] = PAGE // 2
    with closing(decode_engine(tmp_path, gateway[1], PAGE)) as again:
        again.memory[:] = POISON
        again.register()
        room = next(ROOMS)
        again.order("room", room=room, pages=list(range(19)), aux_index=0)
        answer = posted(gateway, "/v1/completions", room, {"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "unfit")
        status, reason = again.status(room)
        assert (status, f"--page-size is {PAGE // 2} " in reason, f"serves {PAGE}" in reason) == ("0", True, True)
        assert (again.memory == POISON).all()
    info.info["page_size"] = PAGE


def test_an_engine_that_does_not_fit_ends_the_gateway_at_its_start(server: Server) -> None:
    with closing(InfoServer()) as info:
        info.info |= {"page_size": 64}
        flags = ("--decode", info.url, "--decode-engine", "sglang", "--prefill", server.url)
        gateway = Server(*flags, "--sglang-page-size", "16", "--bootstrap-port", "0", command="gateway")
        with closing(gateway):
            assert gateway.ended() == 2, gateway.log
            assert f"decode engine {info.url}: --page-size is 64 at the decode engine" in gateway.log
            assert "Traceback" not in gateway.log


def test_an_abort_of_the_engine_and_a_router_that_hangs_up(gateway: tuple[Server, int], one: DecodeEngine) -> None:
    room = next(ROOMS)
    one.order("abort", room=room, generation=1)
    one.messages("ABORT_ACK", room)
    answer = posted(gateway, "/v1/completions", room, {"prompt": PROMPT, "model": MODEL})
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    room = next(ROOMS)
    with pytest.raises(httpx.ReadTimeout):
        posted(gateway, "/v1/completions", room, {"prompt": PROMPT, "model": MODEL}, timeout_s=1.0)
    one.order("room", room=room, pages=list(range(19)), aux_index=0)
    assert one.status(room) == ("0", "the router's connection was closed")
    assert (one.memory == POISON).all()


def test_what_routers_ask_for(gateway: tuple[Server, int]) -> None:
    server = gateway[0]
    for path in ("/health", "/ready", "/v1/models", "/get_model_info", "/server_info", "/metrics", "/version"):
        assert server.get(path).status_code == 200, path
    [model] = json.loads(server.get("/v1/models").text)["data"]
    assert json.loads(server.get(f"/v1/models/{model['id']}").text) == model
    missing = server.get("/v1/models/org%2F..%2Fother")
    assert (missing.status_code, json.loads(missing.text)["error"]["code"]) == (404, "model_not_found")
    warm_up = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}, "bootstrap_host": "2.2.2.2"}
    answer = server.post("/generate", {**warm_up, "bootstrap_room": 0})
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.text)["meta_info"]["prompt_tokens"] == 3
    metrics = server.metrics()
    assert metrics["headrace_gateway_handoffs_total"] >= 3
    assert metrics['headrace_gateway_rooms_ended_total{outcome="handed_over"}'] >= 3
    assert metrics["headrace_gateway_rooms_open"] == 0
    assert metrics["headrace_gateway_tokens_written_total"] > 0
