"""A receiver of spans by OTLP over HTTP, in the place of a collector: decodes what comes, or hangs, or refuses."""

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """A span as a collector has it."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: str
    start: int
    end: int
    failed: bool
    state: str
    attributes: dict[str, Any]


class Receiver:
    """What has come so far, and what is done with what comes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.mode: Literal["take", "hang", "refuse"] = "take"
        self.spans: list[Span] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self.posts = 0
        self.over = threading.Event()

    def take(self, body: bytes) -> None:
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            resource = {item.key: value_of(item.value) for item in group.resource.attributes}
            self.resources.append(resource)
            for scope in group.scope_spans:
                self.spans += [span_of(span, str(resource["service.name"])) for span in scope.spans]

    def trace(self, trace: str, count: int, timeout_s: float = 15.0) -> list[Span]:
        """The spans of a trace, once there are so many."""
        deadline = time.monotonic() + timeout_s
        while len(found := [span for span in list(self.spans) if span.trace == trace]) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} spans: {[span.name for span in found]}"
            time.sleep(0.02)
        return found


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free loopback port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            receiver.posts += 1
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if receiver.mode == "hang":
                receiver.over.wait()
                return
            receiver.headers.append(dict(self.headers))
            if self.path != "/v1/traces" or receiver.mode == "refuse":
                self.send_response(403)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            receiver.bodies.append(body)
            receiver.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Http(ThreadingHTTPServer):
        daemon_threads = True

    with Http(("127.0.0.1", 0), Handler) as http:
        receiver = Receiver(f"http://127.0.0.1:{http.server_address[1]}")
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.over.set()
            http.shutdown()
            thread.join()


def span_of(span: Any, service: str) -> Span:
    return Span(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        failed=span.status.code == span.status.STATUS_CODE_ERROR,
        state=span.trace_state,
        attributes={item.key: value_of(item.value) for item in span.attributes},
    )


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)
