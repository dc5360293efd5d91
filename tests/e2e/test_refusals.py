"""Requests that would wait too long are refused over HTTP, with a time to retry that holds; on one stage and on two."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.harness import Server, pages_in_use, serving, wait_until

LONG_S = 2.0  # of the long prompt
MODEL = "stub:layers=4,vocab=1000,max_len=8192,us_per_token=300,us_per_plan=2000"
FLAGS = ("--role", "prefill", "--model", MODEL, "--threads", "1", "--chunk-tokens", "256", "--policy", "fcfs")
LONG = int(LONG_S / 0.00032)  # tokens


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server whose cost model has seen some passes."""
    with serving(*FLAGS, "--pp", str(request.param)) as started:
        for tokens in (256, 512, 1024):
            answer = ask(started, tokens)
            assert answer.status_code == 200, answer.text
        yield started


def ask(server: Server, tokens: int, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    """One prompt that shares no prefix with others."""
    first = time.monotonic_ns() % 900
    body = {
        "prompt_token_ids": [first, *[7] * (tokens - 1)],
        "handoff": "none",
        "max_tokens": 1,
        "cache_salt": str(time.monotonic_ns()),
        **fields,
    }
    return httpx.post(f"{server.url}/v1/prefill", json=body, headers=headers, timeout=60, trust_env=False)


def behind_a_long_prompt(server: Server, pool: ThreadPoolExecutor) -> Future[httpx.Response]:
    """Begin a prompt of LONG_S seconds; returns when it is being computed."""
    running = pool.submit(ask, server, LONG)
    wait_until(lambda: pages_in_use(server) > 0, 5, "the long prompt")
    return running


@pytest.mark.parametrize("by_header", [pytest.param(False, marks=pytest.mark.full), True])
def test_an_objective_that_cannot_be_met_now_is_met_after_the_time_to_retry(server: Server, by_header: bool) -> None:
    wanted = {"headers": {"x-llm-d-slo-ttft-ms": "700"}} if by_header else {"slo_ttft_ms": 700}
    with ThreadPoolExecutor(1) as pool:
        running = behind_a_long_prompt(server, pool)
        refused = ask(server, 256, **wanted)  # type: ignore[arg-type]
        assert refused.status_code == 429, refused.text
        assert refused.json()["error"]["code"] == "slo_unreachable"
        assert "slo_ttft_ms wants it in 0.700 s" in refused.json()["error"]["message"]
        time.sleep(int(refused.headers["retry-after"]))
        again = ask(server, 256, **wanted)  # type: ignore[arg-type]
        assert again.status_code == 200, again.text
        assert again.elapsed.total_seconds() < 0.7 + 0.5, "beside the time of the client"
        assert running.result().status_code == 200
    wait_until(lambda: pages_in_use(server) == 0, 5, "pages back")


def test_an_objective_that_a_prompt_cannot_meet_alone_is_refused_without_a_time(server: Server) -> None:
    refused = ask(server, LONG, slo_ttft_ms=100)
    assert refused.status_code == 429
    assert "alone" in refused.json()["error"]["message"]
    assert "retry-after" not in refused.headers


def test_what_can_be_met_is_taken(server: Server) -> None:
    assert ask(server, 256, slo_ttft_ms=5000).status_code == 200


def errors_up_to(server: Server, limit: str) -> float:
    """Requests whose prediction was off by at most so much, signed and relative to what came."""
    name = "headrace_ttft_prediction_error_bucket"
    return next(
        value for sample, value in server.metrics().items() if sample.startswith(name) and f'"{limit}"' in sample
    )


def test_predictions_are_near_what_comes(server: Server) -> None:
    """Prompts in a queue, and alone: most within a third."""
    before = [errors_up_to(server, limit) for limit in ("-0.35", "0.35", "+Inf")]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda tokens: ask(server, tokens), (900, 300, 2000, 600, 1500, 800)))
    answers += [ask(server, tokens) for tokens in (2000, 700)]
    assert {answer.status_code for answer in answers} == {200}
    after = [errors_up_to(server, limit) for limit in ("-0.35", "0.35", "+Inf")]
    below, near, every = (new - old for new, old in zip(after, before, strict=True))
    assert every == len(answers)
    assert near - below >= 6


def test_a_bound_of_the_server() -> None:
    with serving(*FLAGS, "--max-predicted-ttft", "1", "--max-queued-seconds", "30") as bounded:
        assert ask(bounded, 512).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            running = behind_a_long_prompt(bounded, pool)
            refused = ask(bounded, 256)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "slo_unreachable"
            assert int(refused.headers["retry-after"]) >= 1
            assert running.result().status_code == 200, "longer than the bound, and alone"
        assert bounded.metrics()['headrace_overload_refusals_total{reason="predicted_ttft"}'] == 1
