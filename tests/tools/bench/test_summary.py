"""Figures of a measurement from outcomes whose figures are known."""

from typing import Any

import pytest

from headrace.tools.bench.outcome import INTERRUPTED, OK, BenchOutcome
from headrace.tools.bench.report import BenchReport, as_text
from headrace.tools.bench.runner import Measured
from headrace.tools.bench.stream_reader import StreamReader
from headrace.tools.bench.summary import LatencyLimits, is_good, open_counts, summarise

NO_LIMITS = LatencyLimits(None, None)


def outcome(due: float, *token_s: float, status: str = OK, **fields: Any) -> BenchOutcome:
    ended = token_s[-1] if token_s else due + 1.0
    values = {"input_tokens": 10, "cached_tokens": 4, "output_tokens": len(token_s), "sent_s": due, "last_s": ended}
    return BenchOutcome(due_s=due, token_s=token_s, ended_s=ended, status=status, **{**values, **fields})


def test_latencies_count_from_when_a_request_was_due() -> None:
    late = outcome(1.0, 3.0, 3.5, 4.0, sent_s=2.0)
    assert late.ttft_s == 2.0
    assert late.tpot_s == 0.5
    assert late.e2e_s == 3.0
    assert late.lag_s == 1.0


def test_time_per_token_counts_tokens_not_events() -> None:
    assert outcome(0.0, 1.0, 2.0, output_tokens=5, last_s=3.0).tpot_s == 0.5
    assert outcome(0.0, 1.0).tpot_s is None


def test_failed_requests_are_counted_by_status_and_count_against_goodput() -> None:
    outcomes = [
        outcome(0.0, 0.1, 0.2),
        outcome(0.0, 0.6, 0.7),
        outcome(0.0, status="429 queue_full"),
        outcome(0.0, status="429 queue_full"),
        outcome(0.0, status="timeout"),
        outcome(0.0, status=INTERRUPTED),
    ]
    measured = Measured(outcomes=outcomes, seconds=2.0, interrupted=True)
    found = summarise(measured, LatencyLimits(0.5, None), (50.0, 99.0))
    assert (found.sent, found.ok, found.interrupted) == (6, 2, 1)
    assert found.failed == {"429 queue_full": 2, "timeout": 1}
    assert found.goodput is not None
    assert found.goodput.share == pytest.approx(1 / 5)
    assert found.goodput.requests_per_s == pytest.approx(0.5)
    assert found.requests_per_s == 1.0
    assert (found.input_tokens_per_s, found.cached_tokens, found.output_tokens_per_s) == (10.0, 8, 2.0)
    assert found.ttft_ms is not None
    assert found.ttft_ms.count == 2
    assert found.ttft_ms.percentiles["p50"] == pytest.approx(350)
    assert found.ttft_ms.max == pytest.approx(600)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == pytest.approx(100)


def test_nothing_ok_has_no_latencies() -> None:
    found = summarise(Measured(outcomes=[], seconds=1.0, interrupted=False), NO_LIMITS, (50.0,))
    assert (found.ttft_ms, found.goodput, found.requests_per_s) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (NO_LIMITS, True),
        (LatencyLimits(1.0, 0.5), True),
        (LatencyLimits(0.9, None), False),
        (LatencyLimits(None, 0.4), False),
    ],
)
def test_a_good_request_is_within_all_limits(limits: LatencyLimits, good: bool) -> None:
    assert is_good(outcome(0.0, 1.0, 1.5, 2.0), limits) is good


def test_a_single_token_has_no_time_per_token_to_limit() -> None:
    assert is_good(outcome(0.0, 1.0), LatencyLimits(2.0, 0.001))


def test_open_requests() -> None:
    counts = open_counts([outcome(0.0, 2.0), outcome(1.0, 3.0), outcome(2.5, 2.7)])
    assert counts == [(0.0, 1), (1.0, 2), (2.0, 1), (2.5, 2), (2.7, 1), (3.0, 0)]


def test_events_may_be_split_anywhere() -> None:
    text = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": ""}]}\n\ndata: [DONE]\n\n'
    for at in range(len(text)):
        reader = StreamReader(streamed=True)
        reader.feed(text[:at], 1.0)
        reader.feed(text[at:], 2.0)
        assert reader.end(200, 3.0) == (OK, "")
        assert len(reader.token_s) == 1


def test_tokens_without_text_are_tokens() -> None:
    reader = StreamReader(streamed=True)
    reader.feed(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n', 1.5)
    reader.feed(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n', 2.0)
    assert reader.end(200, 2.0) == (OK, "")
    assert (reader.token_s, reader.last_s, reader.output_tokens) == ([1.5], 1.5, 3)


@pytest.mark.parametrize(
    ("events", "status"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "stream cut"),
        (b'data: {"error": {"code": "deadline", "message": "late"}}\n\ndata: [DONE]\n\n', "stream error deadline"),
        (b"data: {\n\ndata: [DONE]\n\n", "bad event"),
        (b"data: [DONE]\n\n", "no token"),
    ],
)
def test_streams_that_fail(events: bytes, status: str) -> None:
    reader = StreamReader(streamed=True)
    reader.feed(events, 1.0)
    assert reader.end(200, 2.0)[0] == status


def report(*outcomes: BenchOutcome) -> str:
    measured = Measured(outcomes=outcomes, seconds=1.0, interrupted=False)
    return as_text(
        BenchReport(
            url="http://x",
            endpoint="/v1/completions",
            model="m",
            server="",
            role="",
            arrivals="all at once",
            lengths="8 tokens in",
            seed=1,
            warmups=0,
            limits=NO_LIMITS,
            interrupted=False,
            summary=summarise(measured, NO_LIMITS, (50.0,)),
            requests=outcomes,
        )
    )


def test_a_late_client_is_named() -> None:
    punctual = [outcome(0.0, 0.1, sent_s=0.001) for _ in range(3)]
    assert "late" not in report(*punctual)
    assert "The client sent 25 % of the requests more than 20 ms late" in report(
        *punctual, outcome(0.0, 0.1, sent_s=0.05)
    )


def test_the_table_without_a_second_token_has_no_time_per_token() -> None:
    lines = report(outcome(0.0, 0.1)).splitlines()
    assert [line.split("  ")[0] for line in lines if line.split(" ")[0] in ("TTFT", "TPOT", "ITL", "E2E")] == [
        "TTFT",
        "E2E",
    ]
