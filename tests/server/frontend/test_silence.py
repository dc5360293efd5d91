"""A scheduler that is silent for so long that its requests are failed without it, and then goes on. The real one."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from headrace.core.config import SchedulerConfig
from headrace.core.messages.frontend import Abort, AnyFrontendRequest, Submit
from headrace.core.messages.orders import Forward
from headrace.core.messages.replies import AnySchedulerReply, RequestFailed, RequestFinished, SchedulerReply
from headrace.core.messages.stage_events import PlanDone, SampledToken, StageReady
from headrace.core.runtime.clock import VirtualClock
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.kv.geometry import Geometry
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import DecodeHere, SamplingParams
from headrace.scheduler.scheduler import Event, Scheduler
from headrace.server.frontend.link.scheduler_client import LOST_S, SchedulerClient
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import LENGTH, FakeLink, client, in_loop, json_of, make_config, server_info

PAGE = 16


class Behind:
    """The scheduler behind a link, with a stage whose every token is the first one of the prompt. While it is stopped
    messages wait for it, as in a socket, and the stage computes what it has been given, no more than once."""

    def __init__(self, clock: VirtualClock) -> None:
        self.failed = False
        self.stopped = False
        self.said: list[AnySchedulerReply] = []
        self._clock = clock
        self._events: deque[Event] = deque()
        self._computing: list[Forward] = []
        self._prompts: dict[int, int] = {}
        config = SchedulerConfig(page_size=PAGE, chunk_tokens=512, kv_pages=64, max_model_len=LENGTH, vocab_size=1000)
        self.scheduler = Scheduler(config)
        ready = StageReady(
            stage=0, geometry=Geometry("float32", 1, 1, 1, PAGE), fingerprint="f", data_port=1, kv_pages=64,
            vocab_size=1000,
        )  # fmt: skip
        self._events.append(ready)

    def open(self, take: Callable[[AnySchedulerReply], None], lost: Callable[[], None]) -> None:
        self._take = take
        self._lost = lost
        asyncio.get_running_loop().call_soon(take, server_info(control_port=0))
        self._turn()

    def send(self, message: AnyFrontendRequest) -> None:
        self._events.append(message)
        self._turn()

    def close(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped = True

    def end(self) -> None:
        self.stop()
        self.failed = True
        self._lost()

    def go_on(self) -> None:
        self.stopped = False
        self._turn()

    def compute(self) -> None:
        """Have the stage report what it has been given. The scheduler reads that before what the front end has sent."""
        while self._computing:
            forward = self._computing.pop()
            samples = tuple(SampledToken(row.request, self._prompts[row.request]) for row in forward.rows if row.sample)
            self._events.appendleft(PlanDone(stage=0, seq=forward.seq, duration_s=0.01, samples=samples))
        self._turn()

    def has_to_read(self, kind: type[AnyFrontendRequest]) -> bool:
        return any(isinstance(event, kind) for event in self._events)

    def _turn(self) -> None:
        now = self._clock.now()
        while self._events and not self.stopped:
            effects = self.scheduler.handle(self._events.popleft(), now)
            effects += self.scheduler.plan(now)
            for effect in effects:
                if isinstance(effect, Forward):
                    self._computing.append(effect)
                    for row in effect.rows:
                        if row.request not in self._prompts:
                            self._prompts[row.request] = unpack(row.tokens)[0]
                elif isinstance(effect, SchedulerReply):
                    self.said.append(effect)  # type: ignore[arg-type]
                    asyncio.get_running_loop().call_soon(self._take, effect)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def lost(behind: Behind, clock: VirtualClock, asked: "asyncio.Task[httpx.Response]") -> httpx.Response:
    """The answer to a request whose scheduler has been silent for too long."""
    behind.stop()
    clock.advance(LOST_S + 1)
    return await asked


Test = Callable[[Behind, VirtualClock, Service, httpx.AsyncClient], Awaitable[None]]


def served(test: Test) -> Callable[[Tokenizer], None]:
    """Run a test with a service in front of a scheduler that can be stopped."""

    @in_loop
    async def run(tokenizer: Tokenizer) -> None:
        clock = VirtualClock()
        behind = Behind(clock)
        service = Service(behind, make_config(tokenizer), tokenizer=tokenizer, clock=clock)
        await service.start()
        await service.readiness.wait_engine_ready()
        async with client(service) as http:
            await test(behind, clock, service, http)
        await service.stop()

    return run


def body(token: int, rid: str = "mine") -> dict[str, Any]:
    return {"prompt_token_ids": [token] * 5, "handoff": "none", "rid": rid}


@served
async def test_a_request_that_was_failed_meanwhile_is_aborted(
    behind: Behind, clock: VirtualClock, service: Service, http: httpx.AsyncClient
) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "min_tokens": 40}))
    await until(lambda: not behind.scheduler.idle)
    behind.compute()
    answer = await lost(behind, clock, asked)
    assert (answer.status_code, json_of(answer)["error"]["code"]) == (503, "scheduler_silent")
    assert not behind.scheduler.idle, "it computes for a client that is gone"
    behind.go_on()
    behind.compute()
    behind.compute()
    assert behind.scheduler.idle
    failed = [message for message in behind.said if isinstance(message, RequestFailed)]
    assert [(one.error.code, one.error.status) for one in failed] == [("scheduler_silent", 503)]
    assert not any(isinstance(message, RequestFinished) for message in behind.said)


@served
async def test_an_answer_never_reaches_a_later_request_of_the_same_name(
    behind: Behind, clock: VirtualClock, service: Service, http: httpx.AsyncClient
) -> None:
    asked = asyncio.create_task(http.post("/v1/prefill", json=body(11)))
    await until(lambda: not behind.scheduler.idle)
    assert (await lost(behind, clock, asked)).status_code == 503
    assert (await http.post("/v1/prefill", json=body(22))).status_code == 503
    behind.go_on()
    await until(lambda: service.readiness.unhealthy() is None)
    behind.stop()  # for a moment, in which the second request and the token of the first come
    again = asyncio.create_task(http.post("/v1/prefill", json=body(22)))
    await until(lambda: behind.has_to_read(Submit))
    behind.compute()
    behind.go_on()
    behind.compute()
    answer = await again
    assert (answer.status_code, json_of(answer)["first_token"]["id"]) == (200, 22)


@in_loop
async def test_a_name_stays_taken_until_the_scheduler_has_told_the_end(tokenizer: Tokenizer) -> None:
    class Slow(FakeLink):
        def send(self, message: AnyFrontendRequest) -> None:
            if isinstance(message, Abort):
                self.sent.append(message)  # its answer takes its time
            else:
                super().send(message)

    clock, link = VirtualClock(), Slow(answers_probes=False)
    service = Service(link, make_config(tokenizer), tokenizer=tokenizer, clock=clock)
    await service.start()
    await service.readiness.wait_engine_ready()
    async with client(service) as http:
        asked = asyncio.create_task(http.post("/v1/prefill", json=body(11)))
        await link.wait_for(Submit)
        clock.advance(LOST_S + 1)
        assert (await asked).status_code == 503
        assert [abort.rid for abort in link.of(Abort)] == ["mine"]
        link.answers_probes = True
        await until(lambda: service.readiness.unhealthy() is None)
        refused = await http.post("/v1/prefill", json=body(22))
        assert (refused.status_code, json_of(refused)["error"]["code"]) == (409, "ticket_in_use")
    await service.stop()


@in_loop
async def test_a_call_that_was_left_takes_nothing_back() -> None:
    """What still runs for it, as the post to a prefill server may, does not reach the next call of its name."""
    link = FakeLink()
    calls = SchedulerClient(link, VirtualClock())
    calls.start()
    submit = Submit(rid="mine", prompt=bytes(4), sampling=SamplingParams(), route=DecodeHere())
    async with calls.open(submit) as first:
        link.say(RequestFailed(rid="mine", error=ErrorInfo(code="any", message="any", status=500)))
        with pytest.raises(HeadraceError):
            await first.next()
    async with calls.open(submit):
        first.abort(ErrorInfo(code="late", message="late", status=502))
        first.finish()
        assert link.of(Abort) == []
    await calls.stop()


@served
async def test_open_requests_fail_at_once_when_the_scheduler_has_ended(
    behind: Behind, clock: VirtualClock, service: Service, http: httpx.AsyncClient
) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "max_tokens": 40, "min_tokens": 40}))
    await until(lambda: not behind.scheduler.idle)
    behind.end()
    answer = await asked
    assert (answer.status_code, json_of(answer)["error"]["code"]) == (503, "scheduler_lost")
