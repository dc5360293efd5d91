"""Exports spans in a thread of its own: the event loop pays for an append, a collector that hangs costs spans only.

event loop ── record() ─► queue, bounded ─► thread: a batch ─► SpanSink: spans, protobuf, HTTP ─► collector
                            └ full: lost, counted                        └ not taken: lost, counted
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core.messages.replies import RequestTraced
from headrace.core.stats import Sample
from headrace.server.telemetry.spans import AnySpan

log = logging.getLogger(__name__)

MAX_QUEUED = 4096  # records: some spans each
BATCH = 32  # records: the interpreter's lock is held for some milliseconds to encode them, in parts
PERIOD_S = 1.0
FLUSH_S = 3.0  # at the end, for what is queued
HOPELESS_S = 0.5  # the same, if the collector has not taken the spans before


class SpanSink(Protocol):
    """Sends spans; used by one thread."""

    def export(self, records: Sequence[AnySpan]) -> tuple[int, str]:
        """Send the spans of these records: how many they are, and why the collector has not taken them, "" if it has.
        Blocks for some seconds at most."""
        ...

    def close(self) -> None:
        """End an export that is under way, if that can be done. Called by another thread."""
        ...


class SpanExporter:
    """Queues records, and exports them in batches. open_sink is called in the thread, where it may take its time."""

    def __init__(self, open_sink: Callable[[], SpanSink], max_queued: int = MAX_QUEUED) -> None:
        self._open_sink = open_sink
        self._max_queued = max_queued
        self._queue: deque[AnySpan] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._sink: SpanSink | None = None
        self._thread = threading.Thread(target=self._run, name="span exporter", daemon=True)
        self._exported = 0
        self._lost = {"queue_full": 0, "not_taken": 0}
        self._problem = ""

    @property
    def started(self) -> bool:
        """start() was called."""
        return self._thread.ident is not None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def record(self, span: AnySpan) -> None:
        """Queue a record, or count it as lost. Never blocks; used by the event loop only."""
        if len(self._queue) >= self._max_queued:
            self._lost["queue_full"] += max(1, len(span.spans)) if isinstance(span, RequestTraced) else 1
            return
        self._queue.append(span)
        if len(self._queue) == BATCH:
            self._wake.set()

    def stop(self, timeout_s: float = FLUSH_S) -> None:
        """Export what is queued, for so long at most. Blocks; called once, from any thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(min(timeout_s, HOPELESS_S) if self._problem else timeout_s)
        if self._thread.is_alive():
            if self._sink is not None:
                self._sink.close()
            log.warning("the last spans were not sent: the collector has not taken them in time")

    def statistics(self) -> tuple[Sample, ...]:
        """Counters."""
        lost = [Sample("trace_spans_lost_total", float(count), (reason,)) for reason, count in self._lost.items()]
        return (Sample("trace_spans_exported_total", float(self._exported)), *lost)

    def _run(self) -> None:
        try:
            self._sink = self._open_sink()
            while not self._stopping or self._queue:
                if len(self._queue) < BATCH and not self._stopping:
                    self._wake.wait(PERIOD_S)
                    self._wake.clear()
                self._export(self._sink)
        except Exception:
            log.exception("spans are not exported any more")
            self._max_queued = 0

    def _export(self, sink: SpanSink) -> None:
        """Export a batch, if there is something."""
        batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
        if not batch:
            return
        try:
            spans, problem = sink.export(batch)
        except Exception as error:  # of these records; others may be fine
            if not self._problem:
                log.exception("spans of %d records could not be sent", len(batch))
            spans, problem = len(batch), f"{type(error).__name__}: {error}"
        if problem:
            self._lost["not_taken"] += spans
        else:
            self._exported += spans
        if bool(problem) != bool(self._problem):
            if problem:
                log.warning("spans are lost, since the collector does not take them: %s", problem)
            else:
                log.info("the collector takes spans again; %d were lost so far", sum(self._lost.values()))
        self._problem = problem
