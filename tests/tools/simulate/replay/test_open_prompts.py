"""Replays in which next turns are open prompts: how they grow, what the scheduler is sent, what it brings."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.replies import Progress, RequestFailed, RequestFinished
from headrace.core.runtime.clock import SystemClock
from headrace.core.types import refusals
from headrace.core.types.errors import HeadraceError
from headrace.core.types.packed import pack, packed_length
from headrace.core.types.requests.kv_hints import Retain
from headrace.core.types.requests.request import SamplingParams, Timing, Usage
from headrace.core.types.requests.terms import RequestTerms
from headrace.scheduler.twin.pipeline import CANCEL_S
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompts
from headrace.server.frontend.open_prompts.pieces import LocalPieces
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.testing.world import World
from headrace.tools.simulate.replay.conversations import answered
from headrace.tools.simulate.replay.decode_server import DecodeTier
from headrace.tools.simulate.replay.growth import growths
from headrace.tools.simulate.replay.open_prompts import ReplayOpenPrompts
from headrace.tools.simulate.replay.replay import OPEN_S, ReplayOutcome, ReplayResult
from headrace.tools.simulate.replay.workload import TraceRequest, packed_tokens
from tests.tools.simulate.replay import replays
from tests.tools.simulate.replay.replays import COST, PAGE, request

TURNS = [request(0, 640, 1, 100), request(60, 4000, 1, 20)]


def replay(requests: Sequence[TraceRequest], **changes: Any) -> ReplayResult:
    return replays.replay(requests, replays.config(), **changes)


def first_token(outcome: ReplayOutcome) -> float:
    assert outcome.first_token_s is not None
    return outcome.first_token_s


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(0, 90)), max_size=30))
def test_a_turn_grows_from_what_its_client_has_to_all_but_the_last_part(drawn: list[tuple[int, int, int]]) -> None:
    requests, longest = [], dict.fromkeys(range(4), 0)
    for number, (text, tokens, output) in enumerate(drawn):
        longest[text] += tokens
        requests.append(request(1.5 * number, longest[text], text, output))
    prompts = [turn.segments for turn in answered(requests)]
    found = growths(requests, prompts)
    assert found == growths(requests, prompts)
    for number, after in enumerate(requests):
        before = next(
            (one for one in reversed(requests[:number]) if one.segments[0].text == after.segments[0].text), None
        )
        if before is None:
            assert number not in found, "first turns come whole"
            continue
        steps = found[number]
        answer = max(1, before.output_tokens)
        has_room = before.tokens + answer <= after.tokens
        assert steps[0].tokens == before.tokens + (answer if has_room else 0)
        assert before.arrival_s <= steps[0].at_s < steps[-1].at_s < after.arrival_s
        assert [step.tokens for step in steps] == sorted(step.tokens for step in steps)
        assert after.tokens - steps[-1].tokens <= (after.tokens - steps[0].tokens + 7) // 8
        known = packed_tokens(prompts[number])[: 4 * steps[0].tokens]
        assert packed_tokens(prompts[number]).startswith(known)
        assert known.startswith(packed_tokens(before.segments))


class Scheduler:
    """Takes what a front end sends, and has pieces end when it is told to."""

    def __init__(self) -> None:
        self.got: list[tuple[int, int, Submit | None]] = []
        self.live: str = ""
        self.tokens = 0

    def take(self, message: Any) -> None:
        number = int(message.rid.rpartition(".")[2])
        if isinstance(message, Submit):
            self.live, self.tokens = message.rid, packed_length(message.prompt)
        self.got.append((number, self.tokens, message if isinstance(message, Submit) else None))

    def end(self, failed: bool) -> list[Progress | RequestFinished | RequestFailed]:
        """Whole pages are computed, or the piece fails."""
        if failed:
            return [RequestFailed(rid=self.live, error=refusals.DRAINING.error())]
        done = (self.tokens - 1) // PAGE * PAGE
        usage, timing = Usage(self.tokens, 0, 0), Timing()
        return [
            Progress(rid=self.live, phase="computing", done=done, total=self.tokens),
            RequestFinished(rid=self.live, reason="discarded", usage=usage, timing=timing),
        ]

    def summary(self) -> list[tuple[int, int, Any]]:
        """What was sent, but for the names of prompts."""
        return [
            (number, tokens, submit and (submit.prompt, submit.sampling, submit.route, submit.terms, submit.open))
            for number, tokens, submit in self.got
        ]


class Client:
    """The front end's own end of the link to a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def open(self, submit: Submit) -> "Client":
        self.scheduler.take(submit)
        return self

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.scheduler.live = ""

    async def next(self) -> Any:
        event = await self.events.get()
        if isinstance(event, RequestFailed):
            raise HeadraceError(event.error)
        return event

    def finish(self) -> None:
        self.scheduler.take(Abort(rid=self.scheduler.live, finish=True))


Action = tuple[str, int]  # grow by so many tokens; or the piece ends, and fails if the number is 0
TERMS = RequestTerms(tenant="t", cache_salt="s", retain=Retain.of_open_prompt(OPEN_S))


async def by_the_server(actions: Sequence[Action]) -> Scheduler:
    scheduler = Scheduler()
    client = Client(scheduler)
    prompts = OpenPrompts(
        LocalPieces(client),  # type: ignore[arg-type]
        lambda one: one, SystemClock(), most=1, seconds=OPEN_S, page_size=PAGE, prefix_cache=True, delay_s=0,
    )  # fmt: skip
    fields = GenerationRequest(rid="", prompt=(), sampling=SamplingParams(), terms=TERMS)
    prompt, tokens = prompts.open(fields, None, None), 0
    for action, number in actions:
        if action == "grow":
            tokens += number
            prompts.change(prompt, None, tuple(range(tokens)), tokens)
        elif scheduler.live:
            for event in scheduler.end(failed=not number):
                client.events.put_nowait(event)
        for _ in range(5):
            await asyncio.sleep(0)
    committing = asyncio.create_task(prompts.commit(prompt))
    await asyncio.sleep(0)
    for event in scheduler.end(failed=False) if scheduler.live else ():
        client.events.put_nowait(event)
    await committing
    await prompts.close()
    return scheduler


def by_the_replay(actions: Sequence[Action]) -> Scheduler:
    scheduler, world = Scheduler(), World(0)
    prompts = ReplayOpenPrompts(world, PAGE, scheduler.take)

    def end(failed: bool) -> None:
        for event in scheduler.end(failed):
            if isinstance(event, Progress):
                prompts.progressed(event)
            else:
                scheduler.live = ""
                assert prompts.ended(event)
        assert world.run(100)

    tokens = 0
    for action, number in actions:
        if action == "grow":
            tokens += number
            prompts.change("p", pack(range(tokens)), TERMS)
        elif scheduler.live:
            end(failed=not number)
    went_on: list[bool] = []
    prompts.commit("p", lambda: went_on.append(True))
    assert bool(went_on) == (not scheduler.live)
    if scheduler.live:
        end(failed=False)
    assert went_on == [True]
    return scheduler


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.just("grow"), st.integers(1, 60)) | st.tuples(st.just("end"), st.integers(0, 3)), max_size=12)
)
def test_the_scheduler_is_sent_what_the_front_end_of_a_server_sends(actions: list[Action]) -> None:
    assert by_the_replay(actions).summary() == asyncio.run(by_the_server(actions)).summary()


@pytest.mark.parametrize("latency", [0.0, 0.1])
def test_what_came_while_tools_ran_is_computed_when_the_turn_arrives(latency: float) -> None:
    """3,260 of the second turn's tokens come in eight parts; the last one is left, and what fills no page."""
    off, on = (replay(TURNS, open=opened, latency_s=latency) for opened in (False, True))
    assert [outcome.turn for outcome in on.outcomes] == [1, 2]
    assert off.outcomes[1].cached_tokens == 640
    known = 740 + 3260 * 7 // 8
    assert on.outcomes[1].cached_tokens in range(known - 2 * PAGE, known + 1)
    left = 4000 - on.outcomes[1].cached_tokens
    assert first_token(on.outcomes[1]) == pytest.approx(latency + 0.01 + 0.001 * left)
    assert first_token(off.outcomes[1]) > 3.3
    assert first_token(on.outcomes[0]) == first_token(off.outcomes[0])


def test_a_long_pass_of_an_open_prompt_is_cancelled_when_another_prompt_comes() -> None:
    """Passes of 512 tokens where they are cancelled, of 128 else, which the other prompt waits for."""
    requests = [TURNS[0], request(1, 32, 9), TURNS[1]]
    grows_s = growths(requests, [one.segments for one in requests])[2][1].at_s
    requests[1] = request(grows_s + 0.05, 32, 9)
    short, long = (replay(requests, open=True, cancels=cancels) for cancels in (False, True))
    assert first_token(short.outcomes[1]) == pytest.approx(0.138 - 0.05 + 0.042, abs=1e-6)
    assert first_token(long.outcomes[1]) == pytest.approx(CANCEL_S + 0.042, abs=1e-6)
    assert long.plans < 0.6 * short.plans
    assert long.outcomes[2].cached_tokens > short.outcomes[2].cached_tokens > 2500


def test_with_a_full_server_nothing_is_gained_and_nobody_waits_for_more_than_a_short_pass() -> None:
    """Others come all the time: pieces are computed where nothing else is, if at all."""
    others = [request(0.3 * number + 0.05, 280, 100 + number) for number in range(300)]
    requests = sorted([*TURNS, *others], key=lambda one: one.arrival_s)
    off, on = (replay(requests, open=opened).outcomes for opened in (False, True))
    short = 0.001 * 512 // 4 + 0.01 + 0.118
    for without, opened in zip(off, on, strict=True):
        assert opened.error == ""
        assert first_token(opened) <= first_token(without) + 3 * short


@pytest.mark.parametrize("servers", [1, 2])
def test_a_decode_server_has_the_kv_of_an_open_prompt_early(servers: int) -> None:
    """The link takes 4 s for the whole prompt; half a second of it is left for the commit."""
    tier = DecodeTier(remote="always", costs=(COST,), servers=servers, chunk_tokens=128, handoff_s=0.02)
    off, on = (
        replay(TURNS, open=opened, decode=tier, fetch_tokens_s=1000.0, replicas=2, siblings=True).outcomes
        for opened in (False, True)
    )
    assert [outcome.error for outcome in on] == ["", ""]
    assert [outcome.generated for outcome in on] == [100, 20]
    assert first_token(off[1]) > 3.3
    assert first_token(on[1]) < 1.2


def test_hints_and_returns_go_through_decode_servers_and_siblings() -> None:
    """Everything at once is what its parts are, and nothing is lost."""
    tier = DecodeTier(remote="always", costs=(COST,), chunk_tokens=128, handoff_s=0.02)
    requests = [
        request(20.0 * turn + 1.7 * number, 300 + 400 * turn, number, 40) for turn in range(3) for number in range(9)
    ]
    config = replays.config(kv_pages=160, retain_percent=60)

    def run(**parts: Any) -> ReplayResult:
        settings = {"hints": "none", "returns": False, "siblings": False, "open": False} | parts
        return replays.replay(requests, config, decode=tier, replicas=2, fetch_tokens_s=50_000.0, **settings)

    none, hints, everything = run(), run(hints="oracle"), run(hints="oracle", returns=True, siblings=True, open=True)
    for result in (none, hints, everything):
        assert {outcome.error for outcome in result.outcomes} == {""}
    cached = [sum(outcome.cached_tokens for outcome in result.outcomes) for result in (none, hints, everything)]
    assert cached[0] < cached[1] < cached[2]
    later = [
        sum(first_token(outcome) for outcome in result.outcomes if outcome.turn > 1)
        for result in (none, hints, everything)
    ]
    assert later[2] < later[1] < later[0]
