"""X-Request-Id and traceparent: what is taken over from a client, and what goes on to other servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.server.frontend.request.request_context import RequestContext, TraceSampler, read_context

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def headers(**values: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in values.items()]


def test_ids_are_taken_over_and_go_on() -> None:
    context = read_context(headers(x_request_id="order-7", traceparent=PARENT, tracestate="vendor=1", cookie="secret"))
    assert context == RequestContext("order-7", PARENT, "vendor=1")
    assert context.trace_id == TRACE
    assert context.headers() == {"x-request-id": "order-7", "traceparent": PARENT, "tracestate": "vendor=1"}


def test_an_id_is_made_up_for_a_request_without_one() -> None:
    first, second = read_context([]), read_context([])
    assert first.request_id != second.request_id
    assert first.headers() == {"x-request-id": first.request_id}
    assert first.trace_id == ""


@pytest.mark.parametrize("value", ["", "two words", "new\nline", "\x1b[31m", "é", "x" * 129])
def test_an_id_that_cannot_be_logged_is_replaced(value: str) -> None:
    assert read_context(headers(x_request_id=value)).request_id not in (value, "")


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE,
        f"01-{TRACE}-00f067aa0ba902b7-01",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE}-{'0' * 16}-01",
        PARENT.upper(),
        PARENT + "-x",
    ],
)
def test_a_traceparent_that_is_none_is_left_out_with_its_state(value: str) -> None:
    context = read_context(headers(traceparent=value, tracestate="vendor=1"))
    assert (context.traceparent, context.tracestate) == ("", "")


@given(st.lists(st.tuples(st.sampled_from([b"x-request-id", b"traceparent", b"tracestate", b"x"]), st.binary())))
def test_whatever_is_sent_the_ids_are_headers_again(sent: list[tuple[bytes, bytes]]) -> None:
    for name, value in read_context(sent).headers().items():
        assert value.isascii()
        assert value.isprintable()
        assert name.isprintable()


def test_a_sampled_header_is_followed_whatever_the_share() -> None:
    client = read_context(headers(traceparent=PARENT, tracestate="vendor=1"))
    context = TraceSampler(0.0).sample(client)
    assert context.recorded
    assert context.parent_id == "00f067aa0ba902b7"
    assert context.traceparent[:36] == PARENT[:36]
    assert context.traceparent[36:52] != context.parent_id
    assert context.parent == context.traceparent == context.headers()["traceparent"]
    assert context.headers()["tracestate"] == "vendor=1"
    call = context.child()
    assert (call.parent_id, call.trace_id) == (context.traceparent[36:52], TRACE)
    assert read_context(headers(traceparent=call.traceparent)).traceparent == call.traceparent


def test_a_header_that_is_not_sampled_goes_on_as_it_is() -> None:
    client = read_context(headers(traceparent=PARENT[:-2] + "02"))
    context = TraceSampler(1.0).sample(client)
    assert context == client
    assert context.parent == ""


@pytest.mark.parametrize(("ratio", "low", "high"), [(0.0, 0, 0), (0.25, 180, 320), (1.0, 1000, 1000)])
def test_a_share_of_the_traces_that_begin_here_is_recorded(ratio: float, low: int, high: int) -> None:
    sampler = TraceSampler(ratio)
    contexts = [sampler.sample(read_context(headers(tracestate="vendor=1"))) for _ in range(1000)]
    assert low <= sum(context.recorded for context in contexts) <= high
    assert len({context.trace_id for context in contexts}) == 1000
    for context in contexts:
        assert read_context(headers(traceparent=context.traceparent)).traceparent == context.traceparent
        assert context.traceparent.endswith("-01" if context.recorded else "-00")
        assert (context.parent_id, context.tracestate) == ("", "")
        assert (context.parent != "") == context.recorded
