"""The thread that exports spans: what it sends, loses and counts, and how it ends."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from headrace.core.messages.replies import RequestTraced
from headrace.core.trace import RequestSpan
from headrace.core.types.requests.request import Usage
from headrace.server.telemetry.span_exporter import BATCH, SpanExporter
from headrace.server.telemetry.spans import AnySpan, CalledSpan


def call(number: int = 0) -> CalledSpan:
    return CalledSpan(traceparent="", tracestate="", parent_id="", url=str(number), start=0.0, end=1.0)


class Sink:
    """Keeps what it is given; blocks while it is held, and fails with `problem`."""

    def __init__(self) -> None:
        self.batches: list[list[AnySpan]] = []
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.problem = ""
        self.closed = False

    def export(self, records: Sequence[AnySpan]) -> tuple[int, str]:
        self.entered.set()
        self.go.wait()
        self.batches.append(list(records))
        return len(records), self.problem

    def close(self) -> None:
        self.closed = True


def counts(exporter: SpanExporter) -> dict[str, float]:
    return {sample.labels[0] if sample.labels else "exported": sample.value for sample in exporter.statistics()}


def has_lost(exporter: SpanExporter, spans: int) -> bool:
    return counts(exporter)["not_taken"] == spans


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_records_are_exported_in_order_in_batches_and_the_rest_at_the_end() -> None:
    sink = Sink()
    exporter = SpanExporter(lambda: sink)
    sent = [call(number) for number in range(2 * BATCH + 3)]
    for span in sent:
        exporter.record(span)
    exporter.start()
    wait_for(lambda: len(sink.batches) >= 2)
    exporter.record(call(-1))
    exporter.stop()
    assert [span for batch in sink.batches for span in batch] == [*sent, call(-1)]
    assert max(map(len, sink.batches)) == BATCH
    assert counts(exporter) == {"exported": 2 * BATCH + 4, "queue_full": 0, "not_taken": 0}
    assert not sink.closed


def test_a_full_queue_loses_what_comes_and_counts_its_spans() -> None:
    sink = Sink()
    sink.go.clear()
    exporter = SpanExporter(lambda: sink, max_queued=2)
    exporter.record(call())
    exporter.start()
    assert sink.entered.wait(5)
    phases = (RequestSpan("waiting", 0, 1), RequestSpan("running", 1, 2))
    traced = RequestTraced(rid="r", traceparent="", spans=phases, usage=Usage(1, 1, 0))
    begun = time.perf_counter()
    for span in (call(), call(), call(), traced):
        exporter.record(span)
    assert time.perf_counter() - begun < 1
    assert counts(exporter)["queue_full"] == 3
    sink.go.set()
    exporter.stop()
    assert counts(exporter) == {"exported": 3, "queue_full": 3, "not_taken": 0}


def test_what_is_not_taken_is_lost_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.problem = "refused"
    exporter = SpanExporter(lambda: sink)
    exporter.start()
    with caplog.at_level(logging.INFO):
        for lost in (1, 2):
            exporter.record(call())
            wait_for(partial(has_lost, exporter, lost))
        sink.problem = ""
        exporter.record(call())
        exporter.stop()
    assert counts(exporter) == {"exported": 1, "queue_full": 0, "not_taken": 2}
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "refused" in caplog.text


def test_a_sink_that_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.go.clear()
    exporter = SpanExporter(lambda: sink)
    exporter.record(call())
    exporter.start()
    assert sink.entered.wait(5)
    exporter.record(call())
    begun = time.perf_counter()
    exporter.stop(0.1)
    assert 0.1 <= time.perf_counter() - begun < 2
    assert sink.closed
    assert "were not sent" in caplog.text
    sink.go.set()


def test_a_batch_that_cannot_be_sent_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Sink):
        failures = 2

        def export(self, records: Sequence[AnySpan]) -> tuple[int, str]:
            if self.failures:
                self.failures -= 1
                raise KeyError("an attribute that nobody foresaw")
            return super().export(records)

    exporter = SpanExporter(Faulty)
    exporter.start()
    for lost in (1, 2):
        exporter.record(call())
        wait_for(partial(has_lost, exporter, lost))
    exporter.record(call())
    exporter.stop()
    assert counts(exporter) == {"exported": 1, "queue_full": 0, "not_taken": 2}
    assert caplog.text.count("Traceback") == 1, "said once"


def test_an_exporter_that_cannot_begin_loses_all_that_follows(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Sink:
        raise RuntimeError("a bug")

    exporter = SpanExporter(fail)
    exporter.start()
    wait_for(lambda: "not exported any more" in caplog.text)
    exporter.record(call())
    exporter.stop()
    assert counts(exporter)["queue_full"] == 1
