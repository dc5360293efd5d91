"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. The only module that imports the SDK, which is an extra.

Names of attributes are those of OpenTelemetry's semantic conventions, or begin with "headrace.". Texts of prompts,
completions, errors and headers, and credentials of URLs, are in none of them.
"""

import logging
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from headrace.core.config import TracingConfig
from headrace.core.messages.replies import RequestTraced
from headrace.core.runtime.clock import wall_time
from headrace.core.trace import RequestSpan
from headrace.core.types.named_values import named_values
from headrace.server.telemetry.spans import AnySpan, CalledSpan, ServedSpan

TRACES_PATH = "/v1/traces"
TIMEOUT_S = 5.0  # for one batch, with what is tried again
STEP_S = 1e-3  # by which the time of day has to be off to have been set
NAMES = {  # of phases, as in the times of the request log
    "bootstrap": "bootstrap",
    "waiting": "queue",
    "running": "prefill",
    "inflight": "transfer",
    "fetching": "transfer",
    "generating": "decode",
}
OPERATIONS = {"chat/completions": "chat", "responses": "chat", "completions": "text_completion"}

Attributes = dict[str, str | int | float | Sequence[str]]


class OtlpSink:
    """Builds spans and sends them. model: name of the model in the API."""

    def __init__(
        self, config: TracingConfig, role: str, version: str, model: str, timeout_s: float = TIMEOUT_S
    ) -> None:
        name = config.service_name or f"headrace-{role}"
        about = {"service.name": name, "service.version": version, "service.instance.id": str(uuid.uuid4())}
        given = named_values(config.attributes, "--trace-attribute")
        sdk = {"telemetry.sdk.language": "python", "telemetry.sdk.name": "opentelemetry"}
        self._builder = SpanBuilder(Resource({**about, "headrace.role": role, **given, **sdk}), version, model)
        session = requests.Session()
        session.trust_env = False  # the environment is read with the rest of the configuration
        self._exporter = OTLPSpanExporter(
            endpoint=traces_url(config.endpoint),
            headers=named_values(config.headers, "--otlp-header") or {"user-agent": f"headrace/{version}"},
            timeout=timeout_s,
            compression=Compression.Gzip,
            session=session,
        )
        self._said = _FirstMessage()
        logger = logging.getLogger("opentelemetry.exporter")
        logger.addHandler(self._said)
        logger.propagate = False  # SpanExporter logs it, once

    def export(self, records: Sequence[AnySpan]) -> tuple[int, str]:
        """Send the spans of these records: see SpanSink."""
        self._builder.set_clock()
        spans: list[ReadableSpan] = []
        for record in records:
            spans += self._builder.build(record)
            time.sleep(0)  # the event loop may be waiting for the interpreter's lock
        self._said.text = ""
        result = self._exporter.export(spans)
        return len(spans), "" if result is SpanExportResult.SUCCESS else self._said.text or "no reason is known"

    def close(self) -> None:
        """End an export that is under way."""
        self._exporter.shutdown()


class SpanBuilder:
    """Spans of records, with the time of day."""

    def __init__(self, resource: Resource, version: str, model: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("headrace", version)
        self._model = model
        self._offset_s = 0.0
        self.set_clock()

    def set_clock(self) -> None:
        """Look whether the time of day was set. Otherwise it stays as far from the monotonic clock as it was, so that
        spans of one trace that are built one after the other fit together."""
        offset_s = _wall_offset()
        if abs(offset_s - self._offset_s) > STEP_S:
            self._offset_s = offset_s

    def build(self, record: AnySpan) -> list[ReadableSpan]:
        """The spans of a record."""
        match record:
            case ServedSpan():
                return [self._served(record)]
            case CalledSpan():
                return [self._called(record)]
            case RequestTraced():
                return list(self._phases(record))

    def _served(self, span: ServedSpan) -> ReadableSpan:
        attributes: Attributes = {
            "http.request.method": "POST",
            "http.route": span.route,
            "http.response.status_code": span.status,
            "headrace.request_id": span.request_id,
        }
        if span.rid:
            attributes |= self._generation(span)
        if span.error or span.status >= 400:
            attributes["error.type"] = span.error or str(span.status)
        context = _context(span.traceparent, span.tracestate)
        return self._span(
            f"POST {span.route}",
            context,
            _parent(context, span.parent_id, remote=True),
            (span.start, span.end),
            attributes,
            kind=SpanKind.SERVER,
            failed=span.status >= 500,
        )

    def _generation(self, span: ServedSpan) -> Attributes:
        """Attributes of a request whose prompts were admitted."""
        attributes: Attributes = {
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": self._model,
            "headrace.rid": span.rid,
            "gen_ai.request.choice.count": span.prompts,
        }
        operation = next((name for end, name in OPERATIONS.items() if span.route.endswith(end)), "")
        attributes["gen_ai.operation.name"] = operation or "text_completion"
        if (sampling := span.sampling) is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
            attributes["gen_ai.request.temperature"] = sampling.temperature
            attributes["gen_ai.request.top_p"] = sampling.top_p
            if sampling.top_k:
                attributes["gen_ai.request.top_k"] = sampling.top_k
            if sampling.seed is not None:
                attributes["gen_ai.request.seed"] = sampling.seed
        if span.usages:
            attributes["gen_ai.usage.input_tokens"] = sum(usage.prompt_tokens for usage in span.usages)
            attributes["gen_ai.usage.output_tokens"] = sum(usage.completion_tokens for usage in span.usages)
            attributes["gen_ai.usage.cache_read.input_tokens"] = sum(usage.cached_tokens for usage in span.usages)
            attributes["gen_ai.response.finish_reasons"] = span.finish_reasons
        if span.prefill:
            attributes["headrace.prefill_decision"] = span.prefill
        if span.first_token_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = span.first_token_s
        return attributes

    def _called(self, span: CalledSpan) -> ReadableSpan:
        url = urlsplit(span.url)
        attributes: Attributes = {
            "http.request.method": "POST",
            "url.template": "/v1/prefill",
            "server.address": url.hostname or "",
            "server.port": url.port or (443 if url.scheme == "https" else 80),
        }
        if span.error:
            attributes["error.type"] = span.error
        context = _context(span.traceparent, span.tracestate)
        times = (span.start, span.end)
        parent = _parent(context, span.parent_id)
        failed = bool(span.error)
        return self._span("POST /v1/prefill", context, parent, times, attributes, kind=SpanKind.CLIENT, failed=failed)

    def _phases(self, traced: RequestTraced) -> Iterator[ReadableSpan]:
        """The phases of a request, with the chunks of its prefill below them. In order of their ends: a chunk comes
        before the phase that it is part of."""
        parent = _context(traced.traceparent, "")
        chunks: list[RequestSpan] = []
        last = max((index for index, span in enumerate(traced.spans) if span.phase), default=-1)
        for index, span in enumerate(traced.spans):
            if not span.phase:
                chunks.append(span)
                continue
            context = _below(parent)
            failed = bool(traced.error) and index == last
            attributes = _phase_attributes(NAMES[span.phase], traced)
            if failed:
                attributes["error.type"] = traced.error
            yield from (self._chunk(chunk, context, traced) for chunk in chunks)
            chunks.clear()
            times = (span.start + traced.paused_s, span.end + traced.paused_s)
            yield self._span(NAMES[span.phase], context, parent, times, attributes, failed=failed)
        yield from (self._chunk(chunk, parent, traced) for chunk in chunks)

    def _chunk(self, chunk: RequestSpan, parent: SpanContext, traced: RequestTraced) -> ReadableSpan:
        attributes: Attributes = {"headrace.rid": traced.rid, "headrace.first": chunk.first}
        attributes["headrace.tokens"] = chunk.count
        times = (chunk.start + traced.paused_s, chunk.end + traced.paused_s)
        return self._span("prefill chunk", _below(parent), parent, times, attributes)

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, str | int | float | Sequence[str]],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        failed: bool = False,
    ) -> ReadableSpan:
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            kind=kind,
            status=Status(StatusCode.ERROR) if failed else Status(),
            start_time=self._nanoseconds(times[0]),
            end_time=self._nanoseconds(times[1]),
            instrumentation_scope=self._scope,
        )

    def _nanoseconds(self, monotonic_s: float) -> int:
        return round((monotonic_s + self._offset_s) * 1e9)


class _FirstMessage(logging.Handler):
    """Keeps the first message of an export: why spans were not taken. Others say that it is tried again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


def traces_url(endpoint: str) -> str:
    """Where spans are posted to: the endpoint of all signals has paths for each."""
    endpoint = endpoint.rstrip("/")
    return endpoint if endpoint.endswith(TRACES_PATH) else endpoint + TRACES_PATH


def _phase_attributes(name: str, traced: RequestTraced) -> Attributes:
    attributes: Attributes = {"headrace.rid": traced.rid}
    match name:
        case "prefill":
            attributes["headrace.prompt_tokens"] = traced.usage.prompt_tokens
            attributes["headrace.cached_tokens"] = traced.usage.cached_tokens
            if traced.dropped:
                attributes["headrace.spans_dropped"] = traced.dropped
        case "transfer":
            attributes["headrace.peer"] = traced.peer.rpartition("@")[2]  # no credentials of a URL
            attributes["headrace.kv.pages"] = traced.handoff.pages
            attributes["headrace.kv.bytes"] = traced.handoff.bytes
            attributes["headrace.kv.chunks"] = traced.handoff.chunks
        case "decode":
            attributes["headrace.generated_tokens"] = traced.usage.completion_tokens
    return attributes


def _context(traceparent: str, tracestate: str) -> SpanContext:
    """The span that a traceparent names."""
    _, trace, span, flags = traceparent.split("-")
    state = TraceState.from_header([tracestate]) if tracestate else None
    return SpanContext(int(trace, 16), int(span, 16), False, TraceFlags(int(flags, 16)), state)


def _parent(context: SpanContext, parent_id: str, *, remote: bool = False) -> SpanContext | None:
    if not parent_id:
        return None
    return SpanContext(context.trace_id, int(parent_id, 16), remote, context.trace_flags, context.trace_state)


def _below(parent: SpanContext) -> SpanContext:
    """A new span of the same trace."""
    return SpanContext(parent.trace_id, random.getrandbits(64) or 1, False, parent.trace_flags, parent.trace_state)


def _wall_offset() -> float:
    """Time of day minus monotonic clock, read without a pause between the two."""
    found: list[tuple[float, float]] = []
    for _ in range(3):
        before, wall, after = time.monotonic(), wall_time(), time.monotonic()
        found.append((after - before, wall - (before + after) / 2))
    return min(found)[1]
