"""Calibration: costs from a trace of which they are known, and on a running server."""

import random
from typing import Any

import pytest

from headrace.core.types.errors import ConfigError
from headrace.tools.simulate.calibrate import calibrate, evaluate, stage_passes
from tests.e2e.harness import serving

COST = (2e-8, 1e-4, 0.005)
LATENCY_S = 0.004


def recorded(
    prompts: int, stages: int = 1, chunk: int = 512, pause_s: float = 0.0
) -> tuple[dict[str, Any], dict[str, float]]:
    """A trace in the form of GET /debug/trace, and what each prompt took its client: one after the other.

    pause_s: between passes."""
    draw = random.Random(1)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 2, "tid": 0, "args": {"name": "stage 0"}}
    ]
    clients: dict[str, float] = {}
    now, plan = 1.0, 0
    for number in range(prompts):
        tokens, start, began = draw.randrange(10, 3000), 0, now
        while start < tokens:
            count, plan = min(chunk, tokens - start), plan + 1
            args = {"plan": plan, "rows": 1, "requests": [{"rid": f"r{number}", "start": start, "count": count}]}
            for stage in range(stages):
                a, b, c = (value * (stage + 1) for value in COST)
                seconds = a * ((start + count) ** 2 - start**2) + b * count + c
                for name, step in (("wait", 0.5), ("compute", 0.8 * seconds), ("sample", 0.2 * seconds)):
                    event = {"name": name, "ph": "X", "cat": "plan", "pid": 2 + stage, "tid": 1, "args": args}
                    events.append(event | {"ts": 1e6 * now, "dur": 1e6 * step})
                    now += step if name != "wait" else 0.0
            start, now = start + count, now + pause_s
        clients[f"r{number}"] = now - began + LATENCY_S
    return {"traceEvents": events}, clients


@pytest.mark.parametrize("stages", [1, 2])
def test_known_costs_and_latency_are_found(stages: int) -> None:
    trace, clients = recorded(20, stages)
    found = evaluate("http://x", stage_passes(trace), clients, 4096)
    assert len(found.costs) == stages
    for stage, cost in enumerate(found.costs):
        assert cost == pytest.approx(tuple(value * (stage + 1) for value in COST), rel=1e-6)
    assert found.latency_s == pytest.approx(LATENCY_S, rel=1e-6)
    assert found.kv_tokens == 4096
    assert "off by 0.0% in the median" in found.text


def test_unfinished_passes_do_not_count() -> None:
    trace, clients = recorded(20)
    last = [event for event in trace["traceEvents"] if event["ph"] == "X"][-1]
    last["args"] = {**last["args"], "unfinished": True}
    last["dur"] *= 50
    assert evaluate("http://x", stage_passes(trace), clients, 1).costs[0] == pytest.approx(COST, rel=1e-6)


def test_a_pass_that_was_held_up_does_not_count() -> None:
    trace, clients = recorded(40)
    computed = [event for event in trace["traceEvents"] if event["name"] == "compute"]
    for event in computed[5::25]:
        event["dur"] *= 3
    assert evaluate("http://x", stage_passes(trace), clients, 1).costs[0] == pytest.approx(COST, rel=0.01)


def test_pauses_between_passes_are_part_of_what_they_take() -> None:
    trace, clients = recorded(20, pause_s=0.0004)
    a, b, c = evaluate("http://x", stage_passes(trace), clients, 1).costs[0]
    assert (a, b, c) == pytest.approx((COST[0], COST[1], COST[2] + 0.0004), rel=1e-6)


def test_too_few_passes_are_said() -> None:
    trace, clients = recorded(1, chunk=5000)
    with pytest.raises(ConfigError, match="recorded 1 passes only"):
        evaluate("http://x", stage_passes(trace), clients, 1)
    with pytest.raises(ConfigError, match="recorded no forward pass"):
        evaluate("http://x", stage_passes({"traceEvents": []}), clients, 1)


@pytest.mark.full
def test_a_server_of_two_stages_is_measured() -> None:
    """How close, a benchmark says (benchmarks/simulate_accuracy.py); here that it is of this model at all."""
    model = "stub:layers=4,us_per_token=100,us_per_plan=8000,max_len=4096"
    flags = ("--model", model, "--pp", "2", "--kv-pages", "512", "--threads", "1", "--api-key", "secret")
    with serving("--role", "prefill", *flags) as server:
        found = calibrate(server.url, {"HEADRACE_API_KEY": "secret"}, record_s=3.0)
        with pytest.raises(ConfigError, match=r"--calibrate: /server_info answered 401"):
            calibrate(server.url, {}, record_s=3.0)
    assert len(found.costs) == 2
    assert found.kv_tokens == 512 * 16
    for a, b, c in found.costs:  # 24 ms for the first 400 tokens, which nothing makes faster
        assert 0.024 * 0.9 < a * 400**2 + b * 400 + c < 0.024 * 4, found
