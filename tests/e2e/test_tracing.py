"""Distributed tracing of a pair, by a receiver of OTLP: one trace over both servers, and what a bad collector costs."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.server.telemetry.span_exporter import FLUSH_S
from tests.e2e.harness import Server, pair, wait_until
from tests.server.telemetry.otlp_receiver import Receiver, Span, receiving

MODEL = ("--model", "stub:layers=4,hidden=32", "--threads", "1", "--chunk-tokens", "32")
KEY, SECRET = "api-key-of-clients", "collector-secret"
PROMPT = "confidential words of a client " * 4
CLIENT_SPAN = "00f067aa0ba902b7"
ROUNDING_NS = 2000  # two processes read the offset of the time of day


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def servers(receiver: Receiver) -> Iterator[tuple[Server, Server]]:
    flags = (*MODEL, "--otlp-traces-endpoint", receiver.url, "--otlp-header", f"x-token={SECRET}")
    about = ("--trace-attribute", "deployment.environment.name=a test", "--trace-service-name")
    with pair((*flags, *about, "there"), (*flags, *about, "here", "--trace-sample-ratio", "0")) as both:
        yield both


def complete(server: Server, traceparent: str = "", **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0} | fields
    headers = {"Authorization": f"Bearer {KEY}", "traceparent": traceparent, "tracestate": "vendor=1"}
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=30)


def named(spans: list[Span], service: str, name: str) -> Span:
    (found,) = [span for span in spans if (span.service, span.name) == (service, name)]
    return found


def test_one_trace_has_the_spans_of_both_servers(servers: tuple[Server, Server], receiver: Receiver) -> None:
    _, decode = servers
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = complete(decode, f"00-{trace}-{CLIENT_SPAN}-01")
    assert answer.status_code == 200, answer.text
    chunks = -(-answer.json()["usage"]["prompt_tokens"] // 32)
    assert chunks > 2
    spans = receiver.trace(trace, 10 + chunks)
    assert Counter((span.service, span.name) for span in spans) == {
        ("here", "POST /v1/completions"): 1,
        ("here", "queue"): 1,
        ("here", "POST /v1/prefill"): 1,
        ("here", "transfer"): 1,
        ("here", "decode"): 1,
        ("there", "POST /v1/prefill"): 1,
        ("there", "bootstrap"): 1,
        ("there", "queue"): 1,
        ("there", "prefill"): 1,
        ("there", "prefill chunk"): chunks,
        ("there", "transfer"): 1,
    }

    request, call = named(spans, "here", "POST /v1/completions"), named(spans, "here", "POST /v1/prefill")
    served, prefill = named(spans, "there", "POST /v1/prefill"), named(spans, "there", "prefill")
    assert (request.kind, call.kind, served.kind, prefill.kind) == ("SERVER", "CLIENT", "SERVER", "INTERNAL")
    assert request.parent == CLIENT_SPAN
    parents = {("here", name): request for name in ("POST /v1/prefill", "queue", "transfer", "decode")}
    parents |= {("there", name): served for name in ("bootstrap", "queue", "prefill", "transfer")}
    parents |= {("there", "POST /v1/prefill"): call, ("there", "prefill chunk"): prefill}
    for (service, name), parent in parents.items():
        for span in spans:
            if (span.service, span.name) == (service, name):
                assert span.parent == parent.id
                assert parent.start - ROUNDING_NS <= span.start <= span.end, span
                if span.service == parent.service:  # a caller may have read an answer before its server goes on
                    assert span.end <= parent.end + ROUNDING_NS, span
    assert {span.state for span in (request, call, served)} == {"vendor=1"}
    assert not any(span.failed for span in spans)
    assert len({span.id for span in spans}) == len(spans)

    usage = answer.json()["usage"]
    assert request.attributes | {"gen_ai.response.time_to_first_chunk": 0} == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "headrace.request_id": answer.headers["x-request-id"],
        "headrace.rid": request.attributes["headrace.rid"],
        "gen_ai.provider.name": "headrace",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": MODEL[1],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": 0,
    }
    pieces = [span.attributes for span in spans if span.name == "prefill chunk"]
    ends = sorted((piece["headrace.first"], piece["headrace.tokens"]) for piece in pieces)
    assert [first for first, _ in ends] == [32 * number for number in range(chunks)]
    assert sum(count for _, count in ends) == usage["prompt_tokens"]
    sent = [span.attributes for span in spans if span.name == "transfer"]
    assert {each["headrace.kv.bytes"] for each in sent} == {sent[0]["headrace.kv.bytes"]} != {0}
    assert all(span.attributes["headrace.rid"] == request.attributes["headrace.rid"] for span in spans if span != call)


def test_collectors_get_keys_and_names_but_no_texts_of_clients(
    servers: tuple[Server, Server], receiver: Receiver
) -> None:
    _, decode = servers
    trace = "1" * 32
    answer = complete(decode, f"00-{trace}-{CLIENT_SPAN}-01", guided_regex="confidential[")  # an error that quotes it
    assert answer.status_code == 400
    (span,) = receiver.trace(trace, 1)
    assert span.attributes["error.type"] == answer.json()["error"]["code"]
    assert not span.failed, "an error of the client"
    assert {headers["x-token"] for headers in receiver.headers} == {SECRET}
    for body in receiver.bodies:
        for text in (b"confidential", KEY.encode(), SECRET.encode()):
            assert text not in body
    assert {resource["deployment.environment.name"] for resource in receiver.resources} == {"a test"}
    assert {resource["headrace.role"] for resource in receiver.resources} == {"prefill", "decode"}


def test_only_requests_that_are_sampled_have_spans(servers: tuple[Server, Server], receiver: Receiver) -> None:
    """The decode server samples none by itself, and the prefill server, which samples all, does as it is told."""
    prefill, decode = servers
    before = len(receiver.spans)
    unsampled, sampled = "2" * 32, "3" * 32
    for traceparent in (f"00-{unsampled}-{CLIENT_SPAN}-00", "", f"00-{sampled}-{CLIENT_SPAN}-01"):
        assert complete(decode, traceparent).status_code == 200
    receiver.trace(sampled, 10)
    time.sleep(0.2)  # spans of the others would have been before these, and in the same batch
    assert {span.trace for span in receiver.spans[before:]} == {sampled}
    alone = {"prompt": PROMPT, "handoff": "none"}
    assert httpx.post(f"{prefill.url}/v1/prefill", json=alone, timeout=30).status_code == 200
    wait_until(lambda: any(span.trace != sampled for span in receiver.spans[before:]), 15, "a trace of its own")
    root = next(span for span in receiver.spans[before:] if span.trace != sampled and span.kind == "SERVER")
    assert (root.service, root.parent) == ("there", "")


@pytest.mark.full
def test_a_collector_that_refuses_or_hangs_costs_spans_only(servers: tuple[Server, Server], receiver: Receiver) -> None:
    _, decode = servers
    receiver.mode = "refuse"
    assert complete(decode, f"00-{'4' * 32}-{CLIENT_SPAN}-01").status_code == 200
    wait_until(lambda: decode.total("headrace_trace_spans_lost_total") >= 5, 15, "spans are lost")
    assert decode.metrics()['headrace_trace_spans_lost_total{reason="not_taken"}'] >= 5
    assert decode.log.count("spans are lost") == 1
    receiver.mode = "take"
    assert complete(decode, f"00-{'5' * 32}-{CLIENT_SPAN}-01").status_code == 200
    receiver.trace("5" * 32, 10)
    wait_until(lambda: "takes spans again" in decode.log, 5, "it is logged that they are taken")
    receiver.mode, posts = "hang", receiver.posts
    for _ in range(3):
        begun = time.monotonic()
        assert complete(decode, f"00-{'6' * 32}-{CLIENT_SPAN}-01").status_code == 200
        assert time.monotonic() - begun < 5
    wait_until(lambda: receiver.posts > posts, 5, "an export hangs")
    begun = time.monotonic()
    assert decode.end() == 0
    assert time.monotonic() - begun < FLUSH_S + 5
