"""Second prefill servers of late prompts: the first token of either wins, and the other one is cancelled."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from headrace.core.messages.replies import Progress
from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.errors import CANCELLED, ErrorInfo, HeadraceError
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.core.types.requests.request import SamplingParams, Timing, Usage
from headrace.server.frontend.generation.hedge import Hedges
from headrace.server.frontend.generation.prefill_failover import PrefillFailover, PromptServers
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
)
from headrace.server.routing.failover import MoveReason
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer
from tests.server.fakes import in_loop

ONE, TWO = (PrefillChoice(PrefillServer(f"http://p{number}:1"), None) for number in (1, 2))
REQUEST = GenerationRequest(rid="r", prompt=(1, 2), sampling=SamplingParams())
LOST, LOST_TOO = (
    HeadraceError(ErrorInfo(code="prefill_lost", message="reset", status=502, at_prefill=True)) for _ in range(2)
)
GONE = HeadraceError(ErrorInfo(code=CANCELLED, message="the client went", status=499))
LATE_S = 0.05  # as Hedging has it at least


class Pool:
    """Of two servers, which are expected to answer at once."""

    def __init__(self, known: bool = True, other: bool = True) -> None:
        self.known, self.other, self.open = known, other, 0
        self.avoided: list[tuple[str, MoveReason]] = []

    def forecast(self, _choice: PrefillChoice) -> RemoteForecast | None:
        return RemoteForecast(0.0, 0.0) if self.known else None

    def has_other(self, tried: list[str], _needs: Any) -> bool:
        return self.other and len(tried) < 2

    @contextmanager
    def chosen(self, *_prompt: Any, tried: list[str], **_terms: Any) -> Iterator[PrefillChoice]:
        self.open += 1
        try:
            yield TWO if ONE.server.url in tried else ONE
        finally:
            self.open -= 1

    def avoid(self, choice: PrefillChoice, _error: ErrorInfo, reason: MoveReason) -> None:
        self.avoided.append((choice.server.url, reason))


class Server:
    """Has its first token after so many seconds, and goes on for as long as it may; or an error, after its text."""

    def __init__(self, after_s: float, error: HeadraceError | None = None, text: str = "") -> None:
        self.after_s, self.error, self.text = after_s, error, text
        self.rid, self.cancelled = "", False

    async def run(self, request: GenerationRequest, choice: PrefillChoice, emit: Emit) -> GenerationResult:
        self.rid = request.rid
        try:
            await emit(Progress(rid=request.rid, phase="computing", done=1, total=2))
            await asyncio.sleep(self.after_s)
            for letter in self.text:
                await emit(GenerationDelta(letter))
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return GenerationResult(finish_reason="stop", usage=Usage(2, 1, 0), timing=Timing(), peer=choice.server.url)


async def raced(pool: Pool, first: Server, second: Server) -> tuple[GenerationResult, str, dict[str, float]]:
    """The result, the text that was emitted, and the counts."""
    metrics, said = FrontMetrics(), []

    async def emit(event: Progress | GenerationDelta) -> None:
        said.append(event.text if isinstance(event, GenerationDelta) else "")

    hedges = Hedges(cast(PrefillPool, pool), metrics, 1.0)

    async def attempt(left: GenerationRequest, choice: PrefillChoice, servers: PromptServers) -> GenerationResult:
        return await hedges.run(left, choice, servers, emit, first.run, second.run)

    failover = PrefillFailover(cast(PrefillPool, pool), metrics, VirtualClock())
    result = await failover.run(REQUEST, 0.0, lambda: any(said), attempt)
    counts = {one.labels[0]: one.value for one in metrics.statistics().samples if one.name == "hedges_total"}
    assert pool.open == 0, "it counts as load no more"
    return result, "".join(said), {name: count for name, count in counts.items() if count}


@in_loop
async def test_a_first_server_in_time_is_left_alone() -> None:
    second = Server(0)
    result, text, counts = await raced(Pool(), Server(0.001, text="one"), second)
    assert (result.peer, text, counts, second.rid) == (ONE.server.url, "one", {}, "")


@in_loop
async def test_the_second_server_wins_and_the_first_is_cancelled_at_once() -> None:
    first, second = Server(30), Server(0, text="two")
    result, text, counts = await raced(Pool(), first, second)
    assert (result.peer, text, counts) == (TWO.server.url, "two", {"won": 1})
    assert first.cancelled
    assert (first.rid, second.rid[:6]) == ("r", "hedge-")


@in_loop
async def test_the_first_server_wins_and_the_second_is_cancelled() -> None:
    second = Server(30)
    result, text, counts = await raced(Pool(), Server(2 * LATE_S, text="one"), second)
    assert (result.peer, text, counts, second.cancelled) == (ONE.server.url, "one", {"lost": 1}, True)


@in_loop
async def test_a_second_server_that_fails_changes_nothing() -> None:
    pool = Pool()
    result, text, counts = await raced(pool, Server(3 * LATE_S, text="one"), Server(0, LOST))
    assert (result.peer, text, counts) == (ONE.server.url, "one", {"failed": 1})
    assert pool.avoided == [(TWO.server.url, "lost")], "later prompts go elsewhere"


@in_loop
async def test_a_first_server_that_fails_meanwhile_is_replaced_by_the_second() -> None:
    pool, avoided = Pool(), list[tuple[str, MoveReason]]()

    class Second(Server):
        async def run(self, request: GenerationRequest, choice: PrefillChoice, emit: Emit) -> GenerationResult:
            result = await super().run(request, choice, emit)
            avoided.extend(pool.avoided)
            return result

    result, text, counts = await raced(pool, Server(2 * LATE_S, LOST), Second(2 * LATE_S, text="two"))
    assert (result.peer, text, counts) == (TWO.server.url, "two", {"won": 1})
    assert avoided == [(ONE.server.url, "lost")], "from then on, not from the end of the text"
    assert pool.avoided == avoided


@pytest.mark.parametrize("second_s", [LATE_S / 2, 3 * LATE_S], ids=["before the first", "after it"])
@in_loop
async def test_where_both_fail_the_prompt_was_at_both_servers(second_s: float) -> None:
    pool = Pool()
    with pytest.raises(HeadraceError, match=r"prefill servers p\d:1: reset; p\d:1: reset") as failed:
        await raced(pool, Server(2 * LATE_S, LOST), Server(second_s, LOST_TOO))
    assert (failed.value.info.code, failed.value.info.status) == ("prefill_lost", 502)
    assert sorted(pool.avoided) == [(ONE.server.url, "lost"), (TWO.server.url, "lost")]


@in_loop
async def test_a_second_server_that_fails_in_its_text_is_to_blame_alone() -> None:
    pool = Pool()
    with pytest.raises(HeadraceError, match="reset"):
        await raced(pool, Server(30), Server(0, LOST, text="two"))
    assert pool.avoided == [(TWO.server.url, "lost")]


@in_loop
async def test_an_error_of_the_request_is_no_failure_of_its_servers() -> None:
    pool, second = Pool(), Server(30)
    with pytest.raises(HeadraceError) as failed:
        await raced(pool, Server(2 * LATE_S, GONE), second)
    assert failed.value is GONE
    assert (pool.avoided, second.cancelled) == ([], True)


@pytest.mark.parametrize("pool", [Pool(known=False), Pool(other=False)])
@in_loop
async def test_without_a_forecast_or_another_server_there_is_no_second_one(pool: Pool) -> None:
    second = Server(0, text="two")
    result, _, counts = await raced(pool, Server(2 * LATE_S, text="one"), second)
    assert (result.peer, counts, second.rid) == (ONE.server.url, {}, "")


@in_loop
async def test_a_client_that_leaves_cancels_both() -> None:
    first, second = Server(30), Server(30)
    running = asyncio.ensure_future(raced(Pool(), first, second))
    await asyncio.sleep(2 * LATE_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert first.cancelled
    assert second.cancelled
