"""GET /status of a real pair: under load, after its peer was killed, and after a stage was."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, running, serving, wait_until

MODEL = "stub:layers=4,us_per_token=200,vocab=1000,max_len=2048"
FLAGS = ("--model", MODEL, "--chunk-tokens", "128", "--kv-pages", "512", "--threads", "1")
CLIENTS = 6


def status(server: Server) -> dict[str, Any]:
    response = server.get("/status")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def complete(server: Server, number: int) -> httpx.Response:
    prompt = [1 + (number * 37 + position) % 990 for position in range(300 + number % 5 * 80)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    headers = {"X-Request-Id": f"request-{number}"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Clients that keep a server busy; it may end meanwhile."""
    over = threading.Event()

    def client(first: int) -> None:
        number = first
        while not over.is_set():
            try:
                complete(server, number)
            except httpx.TransportError:
                return
            number += CLIENTS

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            over.set()
    for each in clients:
        each.result()


def check_scheduler(found: dict[str, Any]) -> None:
    """What one answer says fits together."""
    scheduler = found["scheduler"]
    kv, by_phase = scheduler["kv"], {load["phase"]: load["requests"] for load in scheduler["phases"]}
    assert (kv["total"], kv["free"] + kv["cached"] + kv["leased"]) == (512, 512)
    assert len(scheduler["requests"]) == min(40, sum(by_phase.values()))
    for phase, count in by_phase.items():
        assert sum(request["phase"] == phase for request in scheduler["requests"]) == count
    for request in scheduler["requests"]:
        assert 0 <= request["phase_s"] <= request["age_s"] < 120
        assert request["computed_tokens"] <= request["prompt_tokens"]
    for span in (span for stage in scheduler["stages"] for span in stage["spans"]):
        begun, ended, busy, plans, tokens, decode_rows = span
        assert ended <= begun
        assert busy <= begun - ended + 2, "rounded"
        assert decode_rows <= tokens
        assert plans > 0


def good(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests that have ended well."""
    return [one["fields"] for one in found["recent"] if one["fields"]["outcome"] in ("length", "handed_over")]


def busy(found: dict[str, Any]) -> bool:
    """A request is at work, some have ended well, every stage has computed, and the peer is up."""
    scheduler = found["scheduler"]
    computed = [stage for stage in scheduler["stages"] if stage["spans"]]
    working = bool(scheduler["requests"]) and len(computed) == len(found["stages"])
    return working and len(good(found)) > 3 and found["peers"][0]["up"]


def when(server: Server, condition: Any, what: str) -> dict[str, Any]:
    """The first status that satisfies a condition."""
    found: list[dict[str, Any]] = []

    def satisfied() -> bool:
        found.append(status(server))
        check_scheduler(found[-1])
        return bool(condition(found[-1]))

    wait_until(satisfied, 60, what)
    return found[-1]


@pytest.mark.full
def test_a_pair_under_load_and_the_prefill_server_after_its_peer_was_killed() -> None:
    with (
        closing(Server("--role", "prefill", "--pp", "2", *FLAGS)) as prefill,
        closing(Server("--role", "decode", "--prefill", prefill.url, *FLAGS)) as decode,
        running(prefill),
    ):
        decode.started()
        with load(decode):
            of_prefill = when(prefill, busy, "the prefill server is busy")
            of_decode = when(decode, busy, "the decode server is busy")
            check_pair(prefill, of_prefill, of_decode)
            decode.kill()
        gone = when(prefill, lambda found: not found["peers"][0]["up"], "the killed peer is seen")
        (peer,) = gone["peers"]
        assert (peer["backend"], peer["requests"]) == ("", 0)
        last = next(event for event in gone["events"] if event["source"] == "peer")
        assert (last["level"], last["text"]) == ("error", f"{peer['name']} is gone: {peer['note']}")
        idle = when(prefill, lambda found: not found["scheduler"]["requests"], "no request is left")
        assert idle["scheduler"]["kv"]["leased"] == 0
        assert idle["ready"] is True


def check_pair(prefill: Server, of_prefill: dict[str, Any], of_decode: dict[str, Any]) -> None:
    """Each knows the other, and what both say of a request agrees."""
    (peer,) = of_prefill["peers"]
    assert (peer["role"], peer["up"], peer["backend"]) == ("decode", True, "shm")
    (source,) = of_decode["peers"]
    assert (source["name"], source["role"], source["up"], source["backend"]) == (prefill.url, "prefill", True, "shm")
    assert (of_prefill["role"], of_prefill["stages"]) == ("prefill", ["stage 0", "stage 1"])
    assert "512 pages" in of_prefill["memory"][0]
    settings = {each["key"]: (each["value"], each["changed"]) for each in of_prefill["config"]}
    assert (settings["pp"], settings["chunk-tokens"], settings["tp"]) == ((2, True), (128, True), (1, False))
    for found, route in ((of_prefill, "/v1/prefill"), (of_decode, "/v1/completions")):
        fields = good(found)[0]
        number = int(fields["id"].removeprefix("request-"))
        assert (fields["route"], fields["prompt"]) == (route, 300 + number % 5 * 80)
        assert len(good(found)) <= found["first_token"]["requests"] <= len(found["recent"])
        assert found["first_token"]["ttft"]["p50_s"] > 0


@pytest.mark.full
def test_a_stage_that_was_killed_and_came_back() -> None:
    with serving("--role", "colocated", *FLAGS) as server:
        assert status(server)["restarts"] == 0
        server.child("headrace.engine.stage").kill()
        back = when(server, lambda found: found["restarts"] == 1 and found["ready"], "it is ready again")
        texts = [event["text"] for event in back["events"] if event["source"] == "stages"]
        assert texts[0] == "all stages are up again"
        assert "stage 0 failed: stage 0 exited with status -9" in texts
        server.started()  # with other processes
