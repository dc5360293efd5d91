"""Storms of cancelled requests over many stages: all logs alike, nothing left behind, the rest is right."""

import pytest

from headrace.text.tokenizer import load_tokenizer
from tests.e2e.harness import Server, pair, serving, wait_until
from tests.e2e.storm import Storm, make_prompts

NAME = "stub"
SIZES = "stub:layers=8,vocab=1000,max_len=512"
PLAN_US = 10000  # of one stage, give or take as much: the stages are what requests wait for, most of the time
LONGEST = 300
LEFT_OVER = (
    "queue_requests", "queue_tokens", "unplanned_tokens", "plans_in_flight", "reservations_waiting",
    "metadata_rows_in_use", "integrity_errors", "unacked_bytes", "queued_chunks", "open_tickets", "expected_requests",
    "open_requests",
)  # fmt: skip


def settled(values: dict[str, float]) -> bool:
    """Queues and pools are empty, and every stage has had all orders, the same as the others."""
    gauges = {name: value for name, value in values.items() if name.partition("{")[0][len("headrace_") :] in LEFT_OVER}
    sent = values["headrace_orders_total"]
    had = [value for name, value in values.items() if name.startswith("headrace_stage_orders_total")]
    leased = values['headrace_kv_pages{state="leased"}']
    return not any(gauges.values()) and not leased and set(had) == {sent}


def check(server: Server, stages: int) -> None:
    """After the storm: a heartbeat later every stage has compared its log with what was sent, to the last order."""
    wait_until(lambda: settled(server.metrics()), 15, f"all is settled\n{server.metrics()}")
    values = server.metrics()
    assert values["headrace_orders_total"] > 100
    assert sum(name.startswith("headrace_stage_orders_total") for name in values) == stages
    reasons = {name for name, value in values.items() if name.startswith("headrace_requests_total") and value}
    expected = ("cancelled", "length", "handoff", "discarded")
    assert not [name for name in reasons if not any(f'reason="{reason}"' in name for reason in expected)], reasons
    assert any('reason="cancelled"' in name for name in reasons)
    assert values["headrace_checksum_failures_total"] == 0


def model(stages: int) -> str:
    return f"{SIZES},us_per_token={10 * stages},us_per_plan={PLAN_US * stages},jitter_percent=100"


def flags(stages: int) -> tuple[str, ...]:
    options = ("--chunk-tokens", "64", "--kv-pages", "400", "--threads", "1", "--served-model-name", NAME)
    return ("--model", model(stages), "--pp", str(stages), *options)


def brew(seed: int) -> Storm:
    prompts = make_prompts(SIZES, 200, LONGEST, seed)
    return Storm(NAME, load_tokenizer(SIZES, ""), prompts, seed=seed, taking=0.85, concurrency=64)


def judge(storm: Storm, requests: int) -> None:
    print(storm.outcomes)
    assert not storm.wrong, storm.wrong[:5]
    assert storm.outcomes.total() == requests
    taken_back = storm.outcomes["left"] + storm.outcomes["cancelled"]
    assert requests / 4 < taken_back < requests * 0.65, storm.outcomes


@pytest.mark.parametrize(
    ("stages", "peer_stages", "requests"),
    [
        pytest.param(4, 2, 300, marks=pytest.mark.full),
        pytest.param(2, 4, 5000, marks=pytest.mark.full),
        pytest.param(4, 3, 5000, marks=pytest.mark.full),
        pytest.param(8, 2, 5000, marks=pytest.mark.full),
    ],
)
def test_storm_over_a_prefill_and_a_decode_server(stages: int, peer_stages: int, requests: int) -> None:
    storm = brew(seed=stages)
    with pair(flags(stages), flags(peer_stages)) as (prefill, decode):
        storm.run(requests, decode.url, prefill.url)
        check(prefill, stages)
        check(decode, peer_stages)
    judge(storm, requests)


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_storm_over_a_server_that_decodes_its_own(stages: int) -> None:
    requests = 5000
    storm = brew(seed=10 + stages)
    with serving("--role", "colocated", *flags(stages)) as server:
        storm.run(requests, server.url)
        check(server, stages)
    judge(storm, requests)
