"""Pieces of open prompts: what they compute, and that nobody else waits for them longer than for one short pass, or for
one to be cancelled."""

import heapq
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.config.scheduler import Policy
from headrace.core.messages.frontend import Abort, Drain, Submit
from headrace.core.messages.orders import CancelForward, Forward
from headrace.core.messages.replies import Drained, Progress, RequestFinished, Tokens
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.types.packed import pack, unpack
from headrace.core.types.requests.request import Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.costs.short_passes import PiecePasses
from headrace.scheduler.scheduler import Effect, Scheduler
from headrace.testing.scenario import POLICIES
from tests.scheduler.bench import config, geometry

CHUNK, PAGE = 64, 4
PASS_S, TOKEN_S, CANCEL_S = 0.002, 0.001, 0.0005
NAMES = ("alice", "bob")


@dataclass
class Engine:
    """One stage that computes passes in turn, in virtual time, and the scheduler that orders them."""

    scheduler: Scheduler
    now: float = 0.0
    done_at: list[tuple[float, Forward]] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    passes: list[tuple[Forward, float]] = field(default_factory=list)
    """Every pass, and when it was done."""

    cancelled: list[Forward] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)

    def handle(self, *events: Any) -> None:
        """Feed events, plan, and take note of what is ordered and who has ended."""
        for event in events:
            self._take(self.scheduler.handle(event, self.now))
        while effects := self.scheduler.plan(self.now):
            self._take(effects)
        assert self.scheduler.check_integrity() == []

    def step(self) -> None:
        """Compute the oldest pass that was ordered to its end."""
        self.now, forward = self.done_at.pop(0)
        self.passes.append((forward, self.now))
        samples = tuple(SampledToken(row.request, 1) for row in forward.rows if row.sample is not None)
        tokens = sum(row.count for row in forward.rows)
        self.handle(PlanDone(stage=0, seq=forward.seq, duration_s=PASS_S + TOKEN_S * tokens, samples=samples))

    def run(self, arrivals: list[tuple[float, Submit]] | None = None) -> None:
        """Have requests arrive at their times, and compute all."""
        queue = [(at, number, submit) for number, (at, submit) in enumerate(arrivals or ())]
        heapq.heapify(queue)
        while queue or self.done_at:
            deadline = self.scheduler.next_deadline() or float("inf")
            done = self.done_at[0][0] if self.done_at else float("inf")
            if queue and queue[0][0] <= min(done, deadline):
                self.now, _, submit = heapq.heappop(queue)
                self.handle(submit)
            elif deadline < done:
                self.now = deadline
                self._take(self.scheduler.tick(self.now))
                self.handle()
            else:
                self.step()

    def _take(self, effects: list[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Forward):
                begun = max(self.now, self.done_at[-1][0] if self.done_at else 0.0)
                tokens = sum(row.count for row in effect.rows)
                self.done_at.append((begun + PASS_S + TOKEN_S * tokens, effect))
            elif isinstance(effect, CancelForward):
                self._cancel(effect.forward)
            elif isinstance(effect, RequestFinished):
                self.ended[effect.rid] = self.now

    def _cancel(self, seq: int) -> None:
        """The pass ends now, or after the one before it, and those behind it come sooner."""
        place = next(place for place, (_, forward) in enumerate(self.done_at) if forward.seq == seq)
        at, forward = self.done_at[place]
        ends = max(self.now, self.done_at[place - 1][0] if place else 0.0) + CANCEL_S
        self.cancelled.append(forward)
        later = [(end - (at - ends), each) for end, each in self.done_at[place + 1 :]]
        self.done_at[place:] = [(ends, forward), *later]


def engine(*, cancels: bool = False, **changes: Any) -> Engine:
    """A server with one stage that is up. cancels: it can cancel passes."""
    given = {
        "chunk_tokens": CHUNK,
        "kv_pages": 500,
        "page_size": PAGE,
        "max_model_len": 0,
        "prefix_cache": True,
        "max_queued_tokens": 1 << 30,
        "pipeline_depth": 0,
        "refuse_unreachable": False,
    } | changes
    made = Engine(Scheduler(config(**given)))
    pages = int(given["kv_pages"])
    made.handle(
        StageReady(
            stage=0,
            geometry=geometry(PAGE),
            fingerprint="f",
            data_port=1,
            kv_pages=pages,
            vocab_size=1000,
            cancels=cancels,
        )
    )
    return made


def prompt(length: int, text: int = 1) -> bytes:
    return pack([text] * length)


def piece(rid: str, length: int, text: int = 1, **changes: Any) -> Submit:
    fields = {"sampling": SamplingParams(max_tokens=1), "route": Discard(), "progress": True, "open": True}
    return Submit(rid=rid, prompt=prompt(length, text), **(fields | changes))


def other(rid: str, length: int, text: int, **terms: Any) -> Submit:
    return Submit(
        rid=rid,
        prompt=prompt(length, text),
        sampling=SamplingParams(max_tokens=1),
        route=Discard(),
        terms=RequestTerms(**terms),
    )


def counts(made: Engine) -> list[list[int]]:
    """Tokens of the rows of every pass."""
    return [[row.count for row in forward.rows] for forward, _ in made.passes]


def test_a_piece_is_computed_in_short_passes_without_a_token() -> None:
    made = engine()
    made.handle(piece("a", 43))
    made.run()
    assert counts(made) == [[16], [16], [8]], "whole pages, a quarter of a pass at a time"
    assert all(row.sample is None for forward, _ in made.passes for row in forward.rows)
    assert not [effect for effect in made.effects if isinstance(effect, Tokens)]
    assert [effect.done for effect in made.effects if isinstance(effect, Progress)] == [16, 32, 40]
    assert list(made.ended) == ["a"]
    assert made.scheduler.idle
    assert made.scheduler.cached_tokens(prompt(43)) == 40
    made.handle(piece("b", 60))
    made.run()
    assert [(row.start, row.count) for forward, _ in made.passes[3:] for row in forward.rows] == [(40, 16)]
    made.handle(other("c", 60, 1))
    made.run()
    assert [(row.start, row.count) for row in made.passes[-1][0].rows] == [(56, 4)], "the prompt when it is committed"


def test_pieces_share_short_passes_and_never_one_of_others() -> None:
    made = engine(pipeline_depth=1)
    made.handle(piece("a", 9, 1), piece("b", 13, 2), other("c", 100, 3), piece("d", 9, 4))
    made.run()
    assert counts(made) == [[64], [36], [8, 8], [12]]
    assert set(made.ended) == {"a", "b", "c", "d"}


def test_a_piece_counts_as_no_work_that_others_wait_for() -> None:
    made, without = engine(max_queued_requests=1, max_queued_tokens=100), engine()
    made.handle(other("first", 64, 7), *(piece(f"p{number}", 90, number) for number in range(8)))
    without.handle(other("first", 64, 7))
    assert made.scheduler.load(0.0) == without.scheduler.load(0.0)
    names = ("queue_requests", "queue_tokens", "unplanned_tokens", "unplanned_seconds", "predicted_wait_seconds")

    def gauges(one: Engine) -> list[Any]:
        return [sample for sample in one.scheduler.statistics(0.0).samples if sample.name in names]

    assert gauges(made) == gauges(without)
    made.handle(other("second", 64, 8))
    made.run()
    assert made.ended["second"] == pytest.approx(2 * (PASS_S + 64 * TOKEN_S)), "let in, and before all pieces"


def test_a_piece_ends_with_the_pass_that_it_is_in() -> None:
    made = engine()
    made.handle(piece("a", 200, 1))
    made.handle(piece("b", 200, 2))
    made.step()
    running = {row.request for row in made.done_at[0][1].rows}
    made.handle(Abort(rid="a", finish=True), Abort(rid="b", finish=True))
    assert (len(made.ended), len(running)) == (1, 1), "the one that waits has ended at once"
    made.run()
    assert len(made.passes) == 2
    assert set(made.ended) == {"a", "b"}
    cached = [made.scheduler.cached_tokens(prompt(200, text)) for text in (1, 2)]
    assert sum(cached) == 32, "what was computed stays"


@pytest.mark.parametrize("cancels", [False, True])
def test_a_drain_does_not_wait_for_pieces(cancels: bool) -> None:
    made = engine(cancels=cancels)
    made.handle(piece("a", 400), piece("b", 400, 2))
    made.handle(Drain())
    made.run()
    assert len(made.passes) == 1
    assert len(made.cancelled) == cancels
    assert isinstance(made.effects[-1], Drained)


def test_pieces_leave_their_pages_to_others() -> None:
    made = engine(kv_pages=32)
    made.handle(piece("a", 100))
    assert len(made.done_at) == 1
    made.handle(other("whole pool", 127, 2))
    made.run()
    first, last = PASS_S + 16 * TOKEN_S, 2 * PASS_S + 127 * TOKEN_S
    assert made.ended["whole pool"] == pytest.approx(first + last)
    assert len(made.passes) == 3
    assert made.ended["a"] == made.ended["whole pool"], "its pages are gone, and so is it"


def test_pieces_that_take_each_others_pages_end() -> None:
    made = engine(kv_pages=24)
    made.handle(*(piece(f"p{number}", 90, number) for number in range(1, 5)))
    made.run()
    assert len(made.ended) == 4
    assert len(made.passes) < 40


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {"chunk_tokens": 3}])
def test_nothing_is_computed_that_would_not_be_kept(changes: dict[str, Any]) -> None:
    made = engine(**changes)
    made.handle(piece("a", 100))
    assert made.ended == {"a": 0.0}
    assert not made.passes


def test_passes_that_can_be_cancelled_get_longer_and_give_way() -> None:
    made = engine(cancels=True, pipeline_depth=1)
    made.handle(piece("a", 400))
    for _ in range(3):
        made.step()
    begun = made.now
    made.now += 0.03
    made.handle(other("b", 20, 2))
    assert [sum(row.count for row in forward.rows) for _, forward in made.done_at] == [CHUNK, 20]
    made.run()
    assert made.ended["b"] == pytest.approx(begun + 0.03 + CANCEL_S + PASS_S + 20 * TOKEN_S)
    assert len(made.cancelled) == 1
    assert counts(made) == [[16], [32], [64], [64], [20], [16], [32], [64], [64], [64], [44]]
    assert [row.start for forward, _ in made.passes[3:6] for row in forward.rows] == [112, 0, 112]
    assert made.scheduler.cached_tokens(prompt(400)) == 396
    samples = made.scheduler.statistics(1.0).samples
    totals = {sample.labels: sample.value for sample in samples if sample.name == "open_passes_total"}
    assert totals == {("computed",): 9, ("cancelled",): 1}


def test_what_is_cancelled_again_and_again_is_computed_in_shorter_passes() -> None:
    made = engine(cancels=True)
    made.run([(0.0, piece("a", 200)), *((0.05 * at, other(f"b{at}", 8, 100 + at)) for at in range(60))])
    assert len(made.ended) == 61
    assert made.ended["a"] < 1, "though a long pass takes more time than there is between two prompts"


def test_a_piece_that_is_wanted_no_more_ends_with_a_pass_that_is_cancelled() -> None:
    made = engine(cancels=True)
    made.handle(piece("a", 200))
    made.handle(Abort(rid="a", finish=True))
    made.handle(other("b", 20, 2))
    made.run()
    assert made.ended["a"] < made.ended["b"]
    assert counts(made) == [[16], [20]]


def test_nobody_is_expected_to_wait_for_what_gives_way() -> None:
    made, without = engine(cancels=True, pipeline_depth=1), engine(cancels=True, pipeline_depth=1)
    made.handle(piece("a", 200))
    for one in (made, without):
        one.handle(other("first", 64, 7))
    assert made.scheduler.load(0.0) == without.scheduler.load(0.0)


ARRIVALS = st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 4), st.sampled_from(NAMES)), min_size=1, max_size=8)
PIECES = st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 300)), min_size=1, max_size=8)


def finish_times(
    arrivals: list[Any], pieces: list[Any], policy: Policy, depth: int, *, cancels: bool
) -> tuple[list[float], list[float]]:
    """When each of the prompts has ended, in the order of their arrival, and when each of their passes was done."""
    made = engine(cancels=cancels, policy=policy, pipeline_depth=depth, policy_reserve=0.0)
    prompts = [
        (at / 1000, other(f"r{number}", CHUNK * chunks, 100 + number, tenant=name))
        for number, (at, chunks, name) in enumerate(arrivals)
    ]
    opened = [
        (at / 1000, piece(f"p{number}", length, 200 + number, terms=RequestTerms(tenant=NAMES[number % 2])))
        for number, (at, length) in enumerate(pieces)
    ]
    made.run(prompts + opened)
    assert len(made.ended) == len(prompts) + len(opened)
    of_pieces = [(sum(row.count for row in forward.rows), at) for forward, at in made.passes if is_of_pieces(forward)]
    others = [at for forward, at in made.passes if not is_of_pieces(forward)]
    most = CHUNK if cancels else PiecePasses(made.scheduler._state.config).tokens(cancels=False)
    assert all(tokens <= most for tokens, _ in of_pieces)
    return [made.ended[f"r{number}"] for number in range(len(prompts))], others


def is_of_pieces(forward: Forward) -> bool:
    """The prompts of others have other tokens than pieces, whose ids begin at 200."""
    return unpack(forward.rows[0].tokens)[0] >= 200


@settings(max_examples=60, deadline=None)
@given(ARRIVALS, PIECES, st.sampled_from(POLICIES), st.integers(0, 2), st.booleans())
def test_nobody_waits_longer_than_for_one_short_pass(
    arrivals: list[Any], pieces: list[Any], policy: Policy, depth: int, cancels: bool
) -> None:
    """The n-th pass of others is done at most one short pass later than without any piece, or as much as it takes to
    cancel one where the stages can; first come, first served, where the order cannot change, each first token comes at
    most so much later. Passes of others are full, so that a delay does not change what is in them."""
    late_s = (CANCEL_S if cancels else PASS_S + CHUNK // 4 * TOKEN_S) + 1e-9
    ended, passes = finish_times(arrivals, pieces, policy, depth, cancels=cancels)
    alone, passes_alone = finish_times(arrivals, [], policy, depth, cancels=cancels)
    assert all(at <= before + late_s for at, before in zip(passes, passes_alone, strict=True))
    if policy == "fcfs":
        assert all(at <= before + late_s for at, before in zip(ended, alone, strict=True))
