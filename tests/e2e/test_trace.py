"""A trace of a working pipeline: every stage, every plan in stage order, transfers to a real peer."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, pair, serving
from tests.server.telemetry.trace_format import Event, check, lanes, of

MODEL = "stub:layers=6,us_per_token=60,vocab=1000,max_len=2048"
FLAGS = ("--model", MODEL, "--chunk-tokens", "64", "--kv-pages", "1024", "--threads", "1")
STAGES = 3
FIRST = 2  # process number of stage 0
CLIENTS = 4


def complete(server: Server, number: int) -> dict[str, Any]:
    """A prompt of its own, five to ten chunks long, and some tokens."""
    prompt = [1 + (number * 31 + position) % 990 for position in range(300 + number % 7 * 50)]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3 + number % 5, "temperature": 0}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@contextmanager
def load(server: Server) -> Iterator[list[dict[str, Any]]]:
    """Clients that keep a server busy; yields the answers so far."""
    answers: list[dict[str, Any]] = []
    over = threading.Event()

    def client(first: int) -> None:
        number = first
        while not over.is_set():
            answers.append(complete(server, number))
            number += CLIENTS

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            yield answers
        finally:
            over.set()
    for each in clients:
        each.result()


def traced(server: Server, seconds: float) -> dict[str, Any]:
    response = server.get(f"/debug/trace?seconds={seconds}")
    assert response.status_code == 200, response.text
    trace: dict[str, Any] = response.json()
    check(trace)
    assert trace["otherData"]["missing"] == []
    assert not any(trace["otherData"]["dropped"].values())
    return trace


def computed(trace: dict[str, Any]) -> dict[int, dict[int, Event]]:
    """The compute spans of each plan, by stage."""
    plans: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in of(trace, "X", "compute"):
        stages = plans[event["args"]["plan"]]
        assert event["pid"] not in stages, event
        stages[event["pid"] - FIRST] = event
    return plans


def check_plans(trace: dict[str, Any], stages: int) -> None:
    """Every stage has computed the same plans in the same order, each after the stage before it had; spans of a stage
    do not overlap (check() has seen to that)."""
    plans = computed(trace)
    whole = [by_stage for by_stage in plans.values() if len(by_stage) == stages]
    assert len(whole) > 10
    for by_stage in whole:
        args = [
            {key: value for key, value in event["args"].items() if key != "unfinished"} for event in by_stage.values()
        ]
        assert all(each == args[0] for each in args)
        for stage in range(1, stages):
            before, event = by_stage[stage - 1], by_stage[stage]
            assert before["ts"] + before["dur"] <= event["ts"]
    for stage in range(stages):
        order = [event["args"]["plan"] for event in of(trace, "X", "compute", FIRST + stage)]
        assert order == sorted(order)
        assert {event["name"] for event in of(trace, "X", pid=FIRST + stage)} == {
            "wait", "compute", "sample" if stage == stages - 1 else "pass on",
        }  # fmt: skip
    arrows = {(event["pid"], other["pid"]) for event, other in zip(of(trace, "s"), of(trace, "f"), strict=True)}
    assert len(of(trace, "s")) >= len(whole) * (stages - 1)
    assert {pid for pid, _ in arrows} == set(range(FIRST, FIRST + stages - 1))


def begun_and_done(trace: dict[str, Any]) -> dict[str, list[Event]]:
    """Requests that came and went while it was recorded, with the events of their phases."""
    found = {}
    for events in lanes(trace, "request"):
        if events[0]["ts"] > 0 and events[0]["args"]["outcome"] == "done":
            found[events[0]["args"]["rid"]] = events
    return found


@pytest.mark.full
def test_a_prefill_server_with_three_stages_and_its_peer() -> None:
    with (
        pair((*FLAGS, "--pp", str(STAGES)), FLAGS) as (prefill, decode),
        load(decode) as answers,
        ThreadPoolExecutor(2) as pool,
    ):
        of_prefill, of_decode = pool.map(traced, (prefill, decode), (2.0, 2.0))
    check_plans(of_prefill, STAGES)
    answered = {answer["id"]: answer for answer in answers}
    whole = begun_and_done(of_prefill)
    assert whole
    for rid, phases in whole.items():
        assert [event["name"] for event in phases[1:-1:2]] == ["bootstrap", "waiting", "running", "inflight"]
        answer = next(answer for name, answer in answered.items() if rid.startswith(name))
        check_request(of_prefill, rid, answer)
    assert begun_and_done(of_decode).keys() & whole.keys(), "a request has the same name on both sides"
    assert {event["args"]["name"] for event in of(of_decode, "M", "process_name")} == {"scheduler", "stage 0"}
    assert max(event["args"]["plans"] for event in of(of_prefill, "C", "plans in flight")) > 1


def check_request(trace: dict[str, Any], rid: str, answer: dict[str, Any]) -> None:
    """Each stage has computed the whole prompt once, and sent all that the peer says it got, acknowledged."""
    prompt_tokens = answer["usage"]["prompt_tokens"]
    sent = 0
    for stage in range(STAGES):
        rows = [row for event in of(trace, "X", "compute", FIRST + stage) for row in event["args"]["requests"]]
        spans = [(row["start"], row["count"]) for row in rows if row["rid"] == rid]
        cached = spans[0][0]
        assert [start for start, _ in spans] == [
            cached + sum(count for _, count in spans[:i]) for i in range(len(spans))
        ]
        assert cached + sum(count for _, count in spans) == prompt_tokens
        chunks = [
            event["args"]
            for events in lanes(trace, "transfer")
            for event in events[:1]
            if event["args"]["rid"] == rid and event["pid"] == FIRST + stage
        ]
        assert [chunk["chunk"] for chunk in chunks] == list(range(len(chunks)))
        assert {chunk["outcome"] for chunk in chunks} == {"acknowledged"}
        assert all(chunk["peer"] for chunk in chunks)
        sent += sum(chunk["bytes"] for chunk in chunks)
    assert sent == answer["headrace"]["handoff"]["bytes"]


@pytest.mark.full
def test_decoding_through_three_stages() -> None:
    with serving("--role", "colocated", "--pp", str(STAGES), *FLAGS) as server, load(server):
        trace = traced(server, 1.5)
        second = httpx.get(f"{server.url}/debug/trace?seconds=0.2", timeout=30)
        check(second.json())
    check_plans(trace, STAGES)
    assert begun_and_done(trace)
    decoding = [
        event for event in of(trace, "X", "compute") if any(row["count"] == 1 for row in event["args"]["requests"])
    ]
    assert decoding
