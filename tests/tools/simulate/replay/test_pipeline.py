"""Modelled stages beside a recursion over all passes, with passes that are cancelled at any time."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.messages.orders import CancelForward, Forward, PlanRow, SendChunk
from headrace.core.messages.stage_events import AnyStageEvent, ChunkAcked, PlanDone
from headrace.core.types.packed import pack
from headrace.core.types.requests.request import SamplingParams
from headrace.scheduler.costs.chunking import Cost
from headrace.scheduler.twin.pipeline import CANCEL_S, TimedHostTier, TimedPipeline
from headrace.testing.world import World

COSTS: tuple[Cost, ...] = ((0.0, 0.001, 0.01), (0.0, 0.002, 0.003), (0.0, 0.0005, 0.02))


class Stages:
    """Modelled stages, and when each was done with each pass."""

    def __init__(self, costs: Sequence[Cost], link_tokens_s: float | None = None) -> None:
        self.world = World(0)
        self.done: dict[tuple[int, int], float] = {}
        self.samples: dict[int, int] = {}
        self.acknowledged: list[float] = []
        tier = TimedHostTier(self.world, len(costs), 16, None, self._report)
        self.pipeline = TimedPipeline(self.world, costs, link_tokens_s, tier, self._report)

    def _report(self, event: AnyStageEvent) -> None:
        match event:
            case PlanDone():
                self.done[event.seq, event.stage] = self.world.now
                self.samples[event.seq] = len(event.samples)
            case ChunkAcked():
                self.acknowledged.append(self.world.now)

    def order(self, at: float, seq: int, tokens: int) -> None:
        row = PlanRow(1, 0, tokens, pack(()), sample=SamplingParams())
        self.world.at(at, lambda: self.pipeline.order(Forward(seq=seq, rows=(row,))))

    def cancel(self, at: float, seq: int) -> None:
        self.world.at(at, lambda: self.pipeline.order(CancelForward(seq=10_000 + seq, forward=seq)))


def recursion(
    costs: Sequence[Cost], passes: Sequence[tuple[float, int, float]]
) -> tuple[dict[tuple[int, int], float], list[float]]:
    """When each stage is done with each pass, and its busy seconds. passes: ordered at, tokens, cancelled at."""
    done: dict[tuple[int, int], float] = {}
    busy = [0.0] * len(costs)
    for seq, (ordered, tokens, cancelled) in enumerate(passes):
        for stage, (_, b, c) in enumerate(costs):
            ready = ordered if stage == 0 else done[seq, stage - 1]
            begins = max(ready, done.get((seq - 1, stage), 0.0))
            ends = begins if cancelled <= begins else min(begins + b * tokens + c, cancelled + CANCEL_S)
            done[seq, stage] = ends
            busy[stage] += ends - begins
    return done, busy


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 100), st.none() | st.integers(0, 400)), min_size=1, max_size=8
    ),
)
def test_passes_go_through_the_stages_in_order_and_may_be_cancelled(
    stages: int, drawn: list[tuple[int, int, int | None]]
) -> None:
    """Cancels come at odd times, so that none falls together with the end of a pass."""
    at, passes = 0.0, []
    for gap, tokens, cancelled in drawn:
        at += 0.001 * gap
        passes.append((at, tokens, 1e9 if cancelled is None else at + 0.00137 * cancelled + 1.3e-7))
    model = Stages(COSTS[:stages])
    for seq, (ordered, tokens, cancelled) in enumerate(passes):
        model.order(ordered, seq, tokens)
        model.cancel(cancelled, seq)
    assert model.world.run(10_000)
    done, busy = recursion(COSTS[:stages], passes)
    assert model.done == pytest.approx(done)
    assert model.pipeline.busy_s == pytest.approx(busy)
    for seq, (_, _, cancelled) in enumerate(passes):
        assert model.samples[seq] == (cancelled > done[seq, stages - 1])


@pytest.mark.parametrize(("link", "sent"), [(None, 0.05), (1000.0, 0.05 + 0.016)])
def test_a_chunk_leaves_when_its_pass_has_ended(link: float | None, sent: float) -> None:
    model = Stages(COSTS[:1], link)
    model.order(0.0, 7, 40)
    chunk = SendChunk(
        seq=8, request=1, after=7, session="s", ticket="t", generation=1, chunk=0, start=0, count=16, pages=b"",
        dst_pages=b"", row=0, dst_row=0,
    )  # fmt: skip
    model.world.at(0.01, lambda: model.pipeline.order(chunk))
    assert model.world.run(100)
    assert model.acknowledged == [pytest.approx(sent)]
