"""Promised times to first token of live servers, as their clients measure them: as many are kept as were to be."""

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, serving, wait_until

HEADER = "x-headrace-ttft-bound"
STUB = "stub:layers=4,vocab=1000,max_len=8192,us_per_token=100,us_per_plan=3000"
FLAGS = ("--role", "prefill", "--threads", "1", "--chunk-tokens", "256", "--kv-pages", "4096", "--promise", "p90")
WARM_UP = 30
POINTS = 0.03
"""By which the share may be less than promised: of a few hundred promises, and with what clients and HTTP take."""


def body(tokens: int, seed: int, **fields: Any) -> dict[str, Any]:
    """A prompt that shares no prefix with others."""
    ids = random.Random(seed).choices(range(1, 900), k=tokens)
    return {"prompt_token_ids": ids, "handoff": "none", "max_tokens": 1, "cache_salt": str(seed), **fields}


def ask(server: Server, tokens: int, seed: int, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/prefill", json=body(tokens, seed, **fields), timeout=120, trust_env=False)


def offer(server: Server, lengths: Sequence[int], gap_s: float, seed: int = 0) -> list[httpx.Response]:
    """Send prompts at random times."""
    drawing, answers = random.Random(seed), []
    with ThreadPoolExecutor(128) as pool, httpx.Client(timeout=120, trust_env=False) as client:
        for number, tokens in enumerate(lengths):
            prompt = body(tokens, seed * 100_000 + number)
            answers.append(pool.submit(client.post, f"{server.url}/v1/prefill", json=prompt))
            time.sleep(drawing.expovariate(1 / gap_s))
        return [answer.result() for answer in answers]


def lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    drawing = random.Random(seed)
    return [max(8, min(longest, int(drawing.lognormvariate(5.5, 1.0)))) for _ in range(count)]


def kept(answers: Sequence[httpx.Response]) -> list[bool]:
    """Of each promise, whether the client had its answer within the bound."""
    assert all(answer.status_code == 200 for answer in answers)
    return [
        answer.elapsed.total_seconds() <= float(answer.headers[HEADER])
        for answer in answers
        if HEADER in answer.headers
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS, "--model", STUB) as started:
        yield started


@pytest.mark.full
def test_promises_are_made_kept_counted_and_told(server: Server) -> None:
    assert HEADER not in ask(server, 100, 1).headers, "nothing is known yet"
    offer(server, lengths(WARM_UP, 2000), 0.05, seed=1)
    wait_until(lambda: bool(forecast(server)["bounds"]), 10, "the first forecast")
    answers = offer(server, lengths(300, 2000), 0.055, seed=2)
    within = kept(answers)
    assert len(within) == len(answers)
    assert sum(within) / len(within) >= 0.9 - 2 * POINTS, "of so few, which have a standard deviation of 1.7 points"
    promise = answers[-1].json()["promise"]
    assert promise["ttft_bound_ms"] <= 1000 * float(answers[-1].headers[HEADER]) + 0.001, "HTTP comes to it"
    assert promise["kept"] is (promise["ttft_ms"] <= promise["ttft_bound_ms"])
    metrics = server.metrics()
    counted = {result: metrics[f'headrace_promises_total{{result="{result}"}}'] for result in ("kept", "broken")}
    assert counted["kept"] + counted["broken"] >= len(answers)
    assert metrics['headrace_forecasts_total{result="made"}'] >= 1
    assert metrics['headrace_forecasts_total{result="failed"}'] == 0


def forecast(server: Server) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/forecast", timeout=10, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.full
def test_the_forecast_has_bounds_by_length_and_what_a_server_more_brings(server: Server) -> None:
    offer(server, lengths(WARM_UP, 2000), 0.05, seed=3)
    wait_until(lambda: forecast(server)["queue"] is not None, 10, "a forecast")
    found = forecast(server)
    assert found["promise"] == 0.9
    assert [bound["tokens"] for bound in found["bounds"]] == [64, 256, 1024, 4096]
    assert 0 < found["horizon_s"] <= 60
    assert found["queue_with_one_more_server"]["p99_s"] <= found["queue"]["p99_s"] + 0.5
    assert found["age_s"] >= 0


def test_progress_has_the_bound(server: Server) -> None:
    offer(server, lengths(WARM_UP, 2000), 0.05, seed=4)
    wait_until(lambda: bool(forecast(server)["bounds"]), 10, "the first forecast")
    url, prompt = f"{server.url}/v1/prefill", body(1000, 5, stream=True)
    with httpx.stream("POST", url, json=prompt, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        bound_s = float(answer.headers[HEADER])
        lines = [line for line in answer.iter_lines() if line.startswith("data:")]
    first = json.loads(lines[0].removeprefix("data:"))
    assert 0 < first["ttft_bound_ms"] <= 1000 * bound_s + 0.001


@pytest.mark.full
def test_an_objective_below_what_can_be_promised_is_refused(server: Server) -> None:
    offer(server, lengths(WARM_UP, 2000), 0.05, seed=6)
    wait_until(lambda: bool(forecast(server)["bounds"]), 10, "the first forecast")
    refused = ask(server, 4000, 7, slo_ttft_ms=100)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "slo_unreachable"
    assert ask(server, 4000, 8, slo_ttft_ms=60_000).status_code == 200


@pytest.mark.full
def test_without_the_flag_nothing_is_forecast() -> None:
    with serving(*FLAGS[:-2], "--model", STUB) as plain:
        answer = httpx.get(f"{plain.url}/v1/forecast", timeout=10, trust_env=False)
        assert answer.status_code == 404
        assert "--promise" in answer.json()["error"]["message"]
        assert HEADER not in ask(plain, 100, 1).headers


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "count", "longest", "gap_s"),
    [(STUB, 400, 2000, 0.055), ("smollm2", 150, 300, 1.2)],
    ids=["stub", "smollm2"],
)
def test_99_percent_are_kept_within_three_points(model: str, count: int, longest: int, gap_s: float) -> None:
    """At about 0.7 of what the server can do, on two cores that clients share."""
    flags = (*FLAGS[:-1], "p99")
    with serving(*flags, "--model", model) as live:
        offer(live, lengths(WARM_UP, longest), gap_s, seed=1)
        answers = offer(live, lengths(count, longest), gap_s, seed=2)
    within = kept(answers)
    ratios = sorted(float(answer.headers[HEADER]) / answer.elapsed.total_seconds() for answer in answers)
    print(f"{model}: {sum(within)} of {len(within)} kept; bound / time, median {ratios[len(ratios) // 2]:.2f}")
    assert len(within) >= 0.9 * count
    assert sum(within) / len(within) >= 0.99 - POINTS
