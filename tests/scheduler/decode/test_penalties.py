"""The tokens that penalties go by, on their way to the stage that samples."""

import pytest

from headrace.core.messages.orders import Forward, PrepareReceive
from headrace.core.messages.stage_events import KvReceived
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import FetchFrom, FirstToken, SendTo, TokenHistory
from tests.scheduler.bench import Bench, ids


def forward_of(bench: Bench) -> Forward:
    forward = bench.plan()
    assert forward is not None
    return forward


@pytest.mark.parametrize(
    ("penalty", "history"),
    [
        ({"repetition_penalty": 1.2}, TokenHistory(pack(range(7)))),
        ({"frequency_penalty": 0.5}, TokenHistory()),
        ({"presence_penalty": -0.5}, TokenHistory()),
        ({"logit_bias": ((1, 1.0),)}, None),
        ({}, None),
    ],
)
def test_the_first_row_that_samples_brings_them_and_no_other_row(
    penalty: dict[str, object], history: TokenHistory | None
) -> None:
    bench = Bench(pipeline_depth=0, chunk_tokens=4)
    bench.submit("a", 7, max_tokens=3, **penalty)
    found = []
    for tokens in ((), (1,), (2,), (3,)):
        forward = forward_of(bench)
        found.append(forward.rows[0].history)
        bench.done(forward, *tokens)
    assert found == [None, history, None, None]
    bench.assert_empty()


def test_the_prefill_side_has_the_prompt_too() -> None:
    bench = Bench(pipeline_depth=0)
    bench.submit("a", 7, route=SendTo("t", hold=True), repetition_penalty=2.0, max_tokens=5)
    (row,) = forward_of(bench).rows
    assert row.history == TokenHistory(pack(range(7)))


def test_a_preempted_request_brings_them_again_with_its_tokens() -> None:
    bench = Bench(kv_pages=4, pipeline_depth=0, prefix_cache=False)
    bench.submit("old", 7, max_tokens=6)
    bench.submit("young", 7, max_tokens=6, repetition_penalty=1.2)
    bench.done(forward_of(bench), 1, 101)
    bench.done(forward_of(bench), 2, 102)
    for token in (3, 4, 5, 6):
        bench.done(forward_of(bench), token)
    assert bench.metric("preemptions_total") == 1
    (row,) = forward_of(bench).rows
    assert row.history == TokenHistory(pack(range(7)), pack((101, 102)))
    assert ids(row.tokens)[-2:] == [101, 102]


def test_a_fetched_request_brings_its_first_token() -> None:
    bench = Bench(pipeline_depth=0)
    bench.prefill_up()
    bench.submit("a", 10, route=FetchFrom("p", "a"), max_tokens=5, presence_penalty=1.0)
    expect = bench.last(PrepareReceive)
    bench.expecting(expect.request)
    bench.do(KvReceived(stage=0, request=expect.request, first=FirstToken(42, 10, 0), bytes=100, chunks=1))
    assert forward_of(bench).rows[0].history == TokenHistory(b"", pack((42,)))
