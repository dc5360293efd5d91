"""Second prefill servers of late prompts: the first token of either wins, and the other one is cancelled."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from headrace.core.messages.replies import Progress
from headrace.core.types.errors import CANCELLED, ErrorInfo, HeadraceError
from headrace.core.types.requests.remote_prefill import RemoteForecast
from headrace.core.types.requests.request import SamplingParams, Timing, Usage
from headrace.server.frontend.generation.hedge import Hedges, Run
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
)
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer
from tests.server.fakes import in_loop

ONE, TWO = (PrefillChoice(PrefillServer(f"http://p{number}:1"), None) for number in (1, 2))
REQUEST = GenerationRequest(rid="r", prompt=(1, 2), sampling=SamplingParams())
LOST = HeadraceError(ErrorInfo(code="prefill_lost", message="reset", status=502, at_prefill=True))
GONE = HeadraceError(ErrorInfo(code=CANCELLED, message="the client went", status=499))
LATE_S = 0.05  # as Hedging has it at least


class Pool:
    """Of two servers, which are expected to answer at once."""

    def __init__(self, known: bool = True, other: bool = True) -> None:
        self.known, self.other, self.open = known, other, 0

    def forecast(self, _choice: PrefillChoice) -> RemoteForecast | None:
        return RemoteForecast(0.0, 0.0) if self.known else None

    def has_other(self, tried: tuple[str, ...], _needs: Any) -> bool:
        return self.other and ONE.server.url in tried

    @contextmanager
    def chosen(self, _prompt: Any, _salt: Any, _images: Any, *, tried: tuple[str, ...], needs: Any) -> Iterator[Any]:
        assert ONE.server.url in tried
        self.open += 1
        try:
            yield TWO
        finally:
            self.open -= 1


class Server:
    """Has its first token after so many seconds, or an error, and goes on for as long as it may."""

    def __init__(self, after_s: float, error: HeadraceError | None = None, text: str = "") -> None:
        self.after_s, self.error, self.text = after_s, error, text
        self.rid, self.cancelled = "", False

    async def run(self, request: GenerationRequest, choice: PrefillChoice, emit: Emit) -> GenerationResult:
        self.rid = request.rid
        try:
            await emit(Progress(rid=request.rid, phase="computing", done=1, total=2))
            await asyncio.sleep(self.after_s)
            if self.error is not None:
                raise self.error
            for letter in self.text:
                await emit(GenerationDelta(letter))
                await asyncio.sleep(0)
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
    result = await hedges.run(REQUEST, ONE, emit, cast(Run, first.run), cast(Run, second.run))
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
    result, text, counts = await raced(Pool(), Server(3 * LATE_S, text="one"), Server(0, LOST))
    assert (result.peer, text, counts) == (ONE.server.url, "one", {"failed": 1})


@in_loop
async def test_a_first_server_that_fails_meanwhile_is_replaced_by_the_second() -> None:
    result, text, counts = await raced(Pool(), Server(2 * LATE_S, LOST), Server(2 * LATE_S, text="two"))
    assert (result.peer, text, counts) == (TWO.server.url, "two", {"won": 1})


@pytest.mark.parametrize(("first", "second"), [(LOST, LOST), (GONE, None)])
@in_loop
async def test_what_the_first_one_fails_with_is_said_where_both_fail_or_the_client_goes(
    first: HeadraceError, second: HeadraceError | None
) -> None:
    other = Server(3 * LATE_S if second else 30, second)
    with pytest.raises(HeadraceError) as failed:
        await raced(Pool(), Server(2 * LATE_S, first), other)
    assert failed.value is first


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
