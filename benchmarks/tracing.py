"""What tracing costs the event loop of the front end: its time per request, and by how much it is held up.

`python -m benchmarks.tracing` runs the front end's own code for a request in an event loop (the middleware around the
routes, the call to the prefill server, the scheduler's report of the spans) without tracing, with requests that are not
sampled, and with requests that are, whose spans a thread sends to a receiver in another process: nine for each request
of a decode server here. The first time is that of the loop's thread, the second that of the thread that builds and
sends the spans; the lateness is that of a timer in the loop while requests come at a steady rate.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from starlette.types import Message, Receive, Scope, Send

from benchmarks.arguments import add_rounds, make_parser
from benchmarks.report import print_table, run, spread
from headrace.core.config import TracingConfig
from headrace.core.messages.replies import AnySchedulerReply, RequestTraced
from headrace.core.runtime.clock import SystemClock
from headrace.core.runtime.codec import Codec
from headrace.core.trace import RequestSpan
from headrace.core.types.requests.request import HandoffStats, SamplingParams, Timing, Usage
from headrace.server.frontend.request.generation_request import GenerationResult
from headrace.server.frontend.request.request_context import CallSpan, TraceSampler
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.frontend.status.recent_events import RecentEvents
from headrace.server.http.middleware import RequestMetrics
from headrace.server.telemetry.otlp_sink import OtlpSink
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.span_exporter import SpanExporter
from headrace.server.telemetry.spans import AnySpan

MODES = {"no tracing": None, "not sampled": 0.0, "sampled": 1.0}
CHUNKS = 4
TICK_S = 0.001
CLOCK = SystemClock()
SAMPLING = SamplingParams(max_tokens=16)
RESULT = GenerationResult(finish_reason="length", usage=Usage(1000, 16, 0), timing=Timing(0.0, 0.1, 0.0, 0.1, 0.1))


class FrontEnd:
    """What a request passes through, without its body, its model and its sockets."""

    def __init__(self, ratio: float | None, exporter: SpanExporter | None) -> None:
        self._record = exporter.record if exporter is not None else _drop
        sampler = TraceSampler(ratio) if ratio is not None else None
        metrics, recent = FrontMetrics(), RecentEvents()
        self._app = RequestMetrics(self._answer, metrics, CLOCK, recent, sampler, self._record)
        self._codec: Codec[AnySchedulerReply] = Codec(AnySchedulerReply)
        now = time.monotonic()
        phases = [RequestSpan(name, now, now) for name in ("waiting", "fetching", "generating")]
        chunks = [RequestSpan("", now, now, 256 * number, 256) for number in range(CHUNKS)]
        traced = RequestTraced(
            rid="r", traceparent=f"00-{1:032x}-{1:016x}-01", spans=(*chunks, *phases), usage=RESULT.usage,
            handoff=HandoffStats(64, 1 << 20, CHUNKS), peer="http://prefill:8000",
        )  # fmt: skip
        self._traced = self._codec.encode(traced)

    async def request(self) -> None:
        """One request, from its head to its end."""
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [(b"host", b"x")]}
        await self._app(scope, _receive, _send)

    async def _answer(self, scope: Scope, _receive: Receive, send: Send) -> None:
        record: RequestRecord = scope["state"]["record"]
        record.began("r", SAMPLING)
        call = CallSpan(record.context, "http://prefill:8000", CLOCK, self._record)
        call.headers()
        call.began()
        call.ended("")
        record.first_token(0.1)
        if record.context.recorded:
            traced = self._codec.decode(self._traced)
            assert isinstance(traced, RequestTraced)
            self._record(traced)
        record.ended(RESULT)
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(_message: Message) -> None:
    pass


def _drop(_span: AnySpan) -> None:
    pass


async def loop_time(front: FrontEnd, requests: int) -> float:
    """Microseconds of the loop's thread per request, one after the other."""
    begun = time.thread_time()
    for _ in range(requests):
        await front.request()
    return (time.thread_time() - begun) / requests * 1e6


async def lateness(front: FrontEnd, rate: float, seconds: float) -> list[float]:
    """By how many milliseconds a timer of TICK_S was late, while requests come at this rate."""
    late: list[float] = []
    over = False

    async def tick() -> None:
        while not over:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(1000 * (time.perf_counter() - due))

    ticking = asyncio.create_task(tick())
    begun = time.perf_counter()
    for number in range(round(rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        await front.request()
    over = True
    await ticking
    return sorted(late)


def take_spans(pipe: Connection) -> None:
    """A receiver that takes all spans. Tells its port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        pipe.send(http.server_address[1])
        http.serve_forever()


@contextmanager
def receiver() -> Iterator[str]:
    """URL of a receiver in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=take_spans, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


class Measured(NamedTuple):
    """Of one round."""

    loop_us: float
    """Of the loop's thread per request."""
    export_us: float
    """Of the exporting thread per request."""
    late_ms: list[float]
    """Sorted."""
    exported: float
    """Share of the spans."""


def measure(mode: str, url: str, requests: int, rate: float, seconds: float) -> Measured:
    """One round."""
    ratio, config = MODES[mode], TracingConfig(endpoint=url)
    if ratio is None:
        front = FrontEnd(None, None)
        loop_us = asyncio.run(loop_time(front, requests))
        return Measured(loop_us, 0.0, asyncio.run(lateness(front, rate, seconds)), 1.0)
    queued = SpanExporter(lambda: OtlpSink(config, "decode", "0", "m"), max_queued=1 << 20)
    loop_us = asyncio.run(loop_time(FrontEnd(ratio, queued), requests))  # nothing is exported meanwhile
    begun = time.process_time()
    queued.start()
    queued.stop(timeout_s=600)
    export_us = (time.process_time() - begun) / requests * 1e6
    exporter = SpanExporter(lambda: OtlpSink(config, "decode", "0", "m"))
    exporter.start()
    late = asyncio.run(lateness(FrontEnd(ratio, exporter), rate, seconds))
    exporter.stop()
    values = {(sample.name, *sample.labels): sample.value for sample in exporter.statistics()}
    exported = values["trace_spans_exported_total",] / max(1.0, sum(values.values()))
    return Measured(loop_us, export_us, late, exported)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = make_parser("tracing", __doc__)
    parser.add_argument("--requests", type=int, default=5000, metavar="N", help="requests to take the time of")
    parser.add_argument("--rate", type=float, default=100.0, metavar="N", help="requests a second for the lateness")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="how long they come")
    add_rounds(parser, 5)
    given = parser.parse_args(arguments)
    rows: list[list[str]] = []
    found: dict[str, list[Measured]] = {mode: [] for mode in MODES}
    with receiver() as url:
        for _ in range(given.rounds):
            for mode in MODES:
                found[mode].append(measure(mode, url, given.requests, given.rate, given.seconds))
    bare = statistics.median(each.loop_us for each in found["no tracing"])
    for mode, rounds in found.items():
        times = [each.loop_us for each in rounds]
        late = [statistics.median(each.late_ms[round(share * (len(each.late_ms) - 1))] for each in rounds)
                for share in (0.5, 0.99)]  # fmt: skip
        added = f"{statistics.median(times) - bare:+.1f}"
        export = f"{statistics.median(each.export_us for each in rounds):.0f}"
        exported = f"{min(each.exported for each in rounds):.0%}" if MODES[mode] else ""
        rows.append([mode, spread(times), added, export, *(f"{value:.2f}" for value in late), exported])
    columns = ["requests", "loop, µs", "added", "export, µs", "late p50, ms", "p99, ms", "exported"]
    print_table(f"Front end, {given.rate:g} requests/s for the lateness", columns, rows)
    return 0


if __name__ == "__main__":
    run(main)
