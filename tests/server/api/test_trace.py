"""GET /debug/trace: its parameter, its response, and the end of the recording when the client disconnects."""

import asyncio

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import AnyFrontendRequest, EndTrace, StartTrace
from headrace.core.messages.replies import StageTraced, Traced
from headrace.core.trace import SchedulerTrace, StageTrace
from headrace.server.telemetry.tracer import Tracer
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, json_of, listening, running
from tests.server.telemetry.trace_format import check


def traced(trace: int, stages: int) -> Traced:
    scheduler = SchedulerTrace(
        started=1.0, ended=2.0, stages=stages, names=(), spans=(), phases=(), loads=(), dropped=0
    )  # fmt: skip
    return Traced(trace=trace, scheduler=scheduler)


def stage_traced(trace: int, stage: int) -> StageTraced:
    spans = StageTrace(
        plans=(), transfers=(), dropped_plans=0, dropped_transfers=0, ended=2.0, wall_offset_s=0.0
    )  # fmt: skip
    return StageTraced(trace=trace, stage=stage, spans=msgspec.msgpack.encode(spans))


class TracedLink(FakeLink):
    """A scheduler with stages. silent: it does not answer EndTrace."""

    def __init__(self, stages: int = 2, *, silent: bool = False) -> None:
        super().__init__()
        self._stages = stages
        self._silent = silent

    def send(self, message: AnyFrontendRequest) -> None:
        super().send(message)
        if isinstance(message, EndTrace) and not self._silent:
            for stage in range(self._stages):
                self.say(stage_traced(message.trace, stage))
            self.say(traced(message.trace, self._stages))


@in_loop
async def test_a_trace_takes_its_time_and_shows_every_process(tokenizer: Tokenizer) -> None:
    link = TracedLink()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        asked = asyncio.create_task(http.get("/debug/trace?seconds=0.3"))
        await link.wait_for(StartTrace)
        began = asyncio.get_running_loop().time()
        await link.wait_for(EndTrace)
        assert asyncio.get_running_loop().time() - began > 0.25
        response = await asked
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        trace = json_of(response)
        check(trace)
        names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
        assert names == {"scheduler", "stage 0", "stage 1"}
        assert trace["otherData"]["role"] == "prefill"
        assert trace["otherData"]["missing"] == []


@pytest.mark.parametrize("text", ["", "0.09", "60.1", "-1", "nan", "inf", "five", "1e3"])
@in_loop
async def test_seconds_out_of_range_are_refused_naming_field_and_limits(text: str, tokenizer: Tokenizer) -> None:
    link = TracedLink()
    async with running(link, tokenizer) as service, client(service) as http:
        response = await http.get("/debug/trace", params={"seconds": text})
        assert response.status_code == 400
        error = json_of(response)["error"]
        assert error["param"] == "seconds"
        assert "from 0.1 to 60" in error["message"]
        assert repr(text) in error["message"]
        assert link.of(StartTrace) == []


@in_loop
async def test_a_mistyped_parameter_is_refused(tokenizer: Tokenizer) -> None:
    async with running(TracedLink(), tokenizer) as service, client(service) as http:
        response = await http.get("/debug/trace?secs=2")
        assert (response.status_code, json_of(response)["error"]["param"]) == (400, "secs")


@in_loop
async def test_the_key_is_asked_for(tokenizer: Tokenizer) -> None:
    link = TracedLink(stages=0)
    async with running(link, tokenizer, api_keys=("secret",)) as service, client(service) as http:
        assert (await http.get("/debug/trace?seconds=0.1")).status_code == 401
        assert link.of(StartTrace) == []
        shown = {"Authorization": "Bearer secret"}
        assert (await http.get("/debug/trace?seconds=0.1", headers=shown)).status_code == 200


@in_loop
async def test_one_at_a_time(tokenizer: Tokenizer) -> None:
    link = TracedLink()
    async with running(link, tokenizer) as service, client(service) as http:
        first = asyncio.create_task(http.get("/debug/trace?seconds=0.3"))
        await link.wait_for(StartTrace)
        second = await http.get("/debug/trace?seconds=0.1")
        assert (second.status_code, json_of(second)["error"]["code"]) == (409, "trace_running")
        assert (await first).status_code == 200
        assert (await http.get("/debug/trace?seconds=0.1")).status_code == 200
        assert [message.trace for message in link.of(StartTrace)] == [1, 2]


@in_loop
async def test_a_client_that_leaves_ends_the_recording(tokenizer: Tokenizer) -> None:
    link = TracedLink()
    async with (
        running(link, tokenizer) as service,
        listening(service) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        asked = asyncio.create_task(http.get("/debug/trace?seconds=60"))
        await link.wait_for(StartTrace)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await link.wait_for(EndTrace)).trace == 1
        response = await http.get("/debug/trace?seconds=0.1")
        assert response.status_code == 200, "and what comes of the first is not taken for the second"


@in_loop
async def test_a_server_that_is_not_ready_can_be_traced(tokenizer: Tokenizer) -> None:
    link = TracedLink(stages=0)
    link.state = None
    async with running(link, tokenizer) as service, client(service) as http:
        assert (await http.get("/ready")).status_code == 503
        response = await http.get("/debug/trace?seconds=0.1")
        assert response.status_code == 200
        check(json_of(response))


@in_loop
async def test_stages_that_do_not_answer_are_missing_and_a_scheduler_must() -> None:
    posted: list[AnyFrontendRequest] = []
    tracer = Tracer(posted.append, timeout_s=0.2)

    async def record(*answers: Traced | StageTraced) -> asyncio.Task[object]:
        task: asyncio.Task[object] = asyncio.create_task(tracer.record(0.05))
        await asyncio.sleep(0)
        for answer in answers:
            tracer.take(answer)
        return task

    recording = await (await record(stage_traced(1, 1), traced(1, 3), stage_traced(9, 0)))
    assert sorted(recording.stages) == [1]  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="the scheduler did not answer"):
        await (await record(stage_traced(2, 0)))
    assert [type(message) for message in posted] == [StartTrace, EndTrace] * 2
