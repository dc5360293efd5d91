"""Conversations of a trace, and what their clients would retain."""

from collections import Counter

import pytest

from headrace.scheduler.costs.chunking import Cost
from headrace.tools.simulate.replay.hints import LIAR, OTHERS, Hints, turns
from headrace.tools.simulate.replay.replay import ReplayResult
from headrace.tools.simulate.replay.workload import PromptSegment, TraceRequest
from tests.tools.simulate.replay import replays

BLOCK = 16
COST: Cost = (0.0, 1e-3, 1e-3)


def request(at: float, *blocks: int, last: int = BLOCK) -> TraceRequest:
    sizes = [BLOCK] * (len(blocks) - 1) + [last]
    return TraceRequest(at, tuple(map(PromptSegment, blocks, sizes)), sum(sizes))


def test_a_turn_continues_what_its_prompt_begins_with() -> None:
    trace = [
        request(0, 0, 1, 2, last=5),
        request(1, 0, 7, 8, last=5),
        request(10, 0, 1, 3, 4, last=5),  # behind the whole blocks of the first
        request(40, 0, 1, 3, 5, 6),
    ]
    found = turns(trace, "oracle", 2.0)
    assert [each.turn for each in found] == [1, 1, 2, 3]
    assert [each.retain and each.retain.seconds for each in found] == [20.0, None, 60.0, None]
    assert {each.tenant for each in turns(trace[:1], "none", 1.0)} == {LIAR}
    real = turns(trace, "real", 1.0)
    assert real[3].retain is not None
    assert (real[3].retain.seconds, real[3].retain.priority) == (2 * (10 + 30) / 2, 3)
    predicted = turns(trace, "predicted", 1.0)
    assert [each.session for each in predicted] == ["0", "1", "0", "0"]
    assert {each.retain for each in predicted} == {None}


def conversations() -> list[TraceRequest]:
    """Twelve conversations of ten turns each, a turn every 12 s, beside prompts that never come again."""
    found = []
    for turn in range(10):
        for number in range(12):
            blocks = [1000 * number + block for block in range(4 + turn)]
            found.append(request(12.0 * turn + number, *blocks))
            found.append(
                request(12.0 * turn + number + 0.5, *(10**6 * (turn + 1) + 100 * number + b for b in range(6)))
            )
    return found


def replayed(hints: Hints, pages: int = 120) -> ReplayResult:
    config = replays.config(kv_pages=pages, chunk_tokens=64, pipeline_depth=1, eviction="lru", retain_percent=60)
    return replays.replay(conversations(), config, costs=(COST,), hints=hints)


def hits(result: ReplayResult) -> Counter[str]:
    found: Counter[str] = Counter()
    for outcome in result.outcomes:
        found[outcome.tenant] += outcome.cached_tokens
    return found


@pytest.mark.parametrize("hints", ["oracle", "real", "predicted"])
def test_hints_keep_what_comes_again(hints: Hints) -> None:
    with_hints, without = replayed(hints), replayed("none")
    assert sum(hits(with_hints).values()) > 1.2 * sum(hits(without).values())
    assert sum(with_hints.busy_s) < sum(without.busy_s)


def test_a_liar_takes_no_more_than_its_bound() -> None:
    honest, lied = hits(replayed("none", 200)), hits(replayed("lying", 200))
    smaller = hits(replayed("none", 200 - 200 * 60 // 100))
    assert honest[OTHERS] > 4000
    assert lied[OTHERS] >= smaller[OTHERS]
    assert lied[OTHERS] >= 0.95 * honest[OTHERS], "it has other pages to give"
