"""Spans as OpenTelemetry's SDK has them: ids, parents, times, names of the semantic conventions."""

from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes, server_attributes
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from headrace.core.config import TracingConfig
from headrace.core.messages.replies import RequestTraced
from headrace.core.runtime.clock import wall_offset
from headrace.core.trace import RequestSpan
from headrace.core.types.requests.request import HandoffStats, SamplingParams, Usage
from headrace.server.telemetry.otlp_sink import OtlpSink, SpanBuilder, traces_url
from headrace.server.telemetry.spans import AnySpan, CalledSpan, ServedSpan
from tests.server.telemetry.otlp_receiver import receiving

TRACE, SPAN, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", "1111111111111111"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
SERVED = ServedSpan(
    traceparent=TRACEPARENT,
    tracestate="vendor=1,other=2",
    parent_id=PARENT,
    route="/v1/chat/completions",
    status=200,
    start=10.0,
    end=12.5,
    request_id="i",
    rid="r",
    prompts=2,
    sampling=SamplingParams(max_tokens=7, temperature=0.5, top_k=3, seed=11),
    usages=(Usage(10, 3, 4), Usage(10, 5, 10)),
    finish_reasons=("stop", "length"),
    first_token_s=0.25,
)
CALLED = CalledSpan(traceparent=TRACEPARENT, tracestate="", parent_id=PARENT, url="https://u:p@[::1]", start=1, end=2)
TRACED = RequestTraced(
    rid="r",
    traceparent=TRACEPARENT,
    spans=(
        RequestSpan("waiting", 1, 2),
        RequestSpan("", 2, 3, 0, 64),
        RequestSpan("", 3, 4, 64, 36),
        RequestSpan("running", 2, 4),
        RequestSpan("inflight", 4, 6),
    ),
    usage=Usage(100, 1, 0),
    handoff=HandoffStats(pages=7, bytes=700, chunks=2),
    peer="http://user:password@decode:8001",
    paused_s=100.0,
)


def built(record: AnySpan) -> list[ReadableSpan]:
    return SpanBuilder(Resource({}), "1", "a model").build(record)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_served_request() -> None:
    (span,) = built(SERVED)
    assert span.context is not None
    assert span.parent is not None
    assert (format_trace_id(span.context.trace_id), format_span_id(span.context.span_id)) == (TRACE, SPAN)
    assert (format_span_id(span.parent.span_id), span.parent.is_remote) == (PARENT, True)
    assert dict(span.context.trace_state) == {"vendor": "1", "other": "2"}
    assert span.end_time is not None
    assert span.start_time is not None
    assert span.end_time - span.start_time == pytest.approx(2.5e9, abs=1000)
    assert span.start_time == pytest.approx(1e9 * (10 + wall_offset()), abs=1e8)
    assert attributes(span) | {"headrace.rid": 0} == {
        http_attributes.HTTP_REQUEST_METHOD: "POST",
        http_attributes.HTTP_ROUTE: "/v1/chat/completions",
        http_attributes.HTTP_RESPONSE_STATUS_CODE: 200,
        "headrace.request_id": "i",
        "headrace.rid": 0,
        gen_ai_attributes.GEN_AI_PROVIDER_NAME: "headrace",
        gen_ai_attributes.GEN_AI_OPERATION_NAME: gen_ai_attributes.GenAiOperationNameValues.CHAT.value,
        gen_ai_attributes.GEN_AI_REQUEST_MODEL: "a model",
        gen_ai_attributes.GEN_AI_REQUEST_CHOICE_COUNT: 2,
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: 7,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_P: 1.0,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_K: 3,
        gen_ai_attributes.GEN_AI_REQUEST_SEED: 11,
        gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS: 20,
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: 8,
        gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 14,
        gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS: ("stop", "length"),
        gen_ai_attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: 0.25,
    }


@pytest.mark.parametrize(
    ("status", "error", "kind", "code"),
    [
        (200, "", None, StatusCode.UNSET),
        (400, "bad", "bad", StatusCode.UNSET),
        (499, "", "499", StatusCode.UNSET),
        (503, "overloaded", "overloaded", StatusCode.ERROR),
    ],
)
def test_errors_of_the_server_are_errors_of_its_span(
    status: int, error: str, kind: str | None, code: StatusCode
) -> None:
    fields = {"traceparent": TRACEPARENT, "tracestate": "", "parent_id": "", "route": "/v1/prefill", "request_id": "i"}
    (span,) = built(ServedSpan(**fields, start=0.0, end=1.0, status=status, error=error))
    assert attributes(span).get(error_attributes.ERROR_TYPE) == kind
    assert span.status.status_code is code
    assert span.parent is None


def test_a_call_names_the_server_without_credentials() -> None:
    (span,) = built(CALLED)
    assert attributes(span) == {
        http_attributes.HTTP_REQUEST_METHOD: "POST",
        url_attributes.URL_TEMPLATE: "/v1/prefill",
        server_attributes.SERVER_ADDRESS: "::1",
        server_attributes.SERVER_PORT: 443,
    }


def test_phases_are_below_the_request_and_chunks_below_their_phase() -> None:
    spans = {span.name + str(attributes(span).get("headrace.first", "")): span for span in built(TRACED)}
    assert set(spans) == {"queue", "prefill chunk0", "prefill chunk64", "prefill", "transfer"}
    prefill = spans["prefill"].context
    assert prefill is not None
    for name, span in spans.items():
        assert span.parent is not None
        assert span.parent.span_id == (prefill.span_id if name.startswith("prefill chunk") else int(SPAN, 16))
        assert span.status.status_code is StatusCode.UNSET
    assert spans["queue"].start_time == pytest.approx(1e9 * (101 + wall_offset()), abs=1e8)
    sent = attributes(spans["transfer"])
    assert (sent["headrace.peer"], sent["headrace.kv.bytes"]) == ("decode:8001", 700)


def test_the_phase_in_which_a_request_failed_is_the_one_with_the_error() -> None:
    failed = RequestTraced(
        rid="r", traceparent=TRACEPARENT, spans=TRACED.spans[:3], usage=Usage(1, 0, 0), error="stage_failed"
    )
    spans = built(failed)
    assert [(span.name, span.status.status_code) for span in spans] == [
        ("queue", StatusCode.ERROR), ("prefill chunk", StatusCode.UNSET), ("prefill chunk", StatusCode.UNSET),
    ]  # fmt: skip
    assert attributes(spans[0])["error.type"] == "stage_failed"


def test_what_a_receiver_gets_and_what_is_said_of_one_that_is_not_there() -> None:
    config = TracingConfig(headers=("x-key=a%20b",), attributes=("deployment.environment.name=test",))
    with receiving() as receiver:
        sink = OtlpSink(TracingConfig(**{**_fields(config), "endpoint": receiver.url}), "decode", "1.2", "m")
        assert sink.export([SERVED, CALLED, TRACED]) == (7, "")
        sink.close()
    assert len(receiver.trace(TRACE, 7)) == 7
    assert receiver.headers[0]["x-key"] == "a b"
    (resource,) = receiver.resources
    assert resource["service.name"] == "headrace-decode"
    assert (resource["service.version"], resource["deployment.environment.name"]) == ("1.2", "test")
    gone = OtlpSink(TracingConfig(**{**_fields(config), "endpoint": receiver.url}), "decode", "1.2", "m", timeout_s=0.5)
    spans, problem = gone.export([SERVED])
    gone.close()
    assert spans == 1
    assert "refused" in problem or "Failed" in problem


def _fields(config: TracingConfig) -> dict[str, Any]:
    return {"headers": config.headers, "attributes": config.attributes}


@pytest.mark.parametrize("endpoint", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_the_path_of_traces_is_added(endpoint: str) -> None:
    assert traces_url(endpoint) == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/") == "https://c/otlp/v1/traces"
