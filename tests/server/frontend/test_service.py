"""Health, readiness, drain, a silent scheduler, limits and metrics of a server."""

import asyncio
import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.config import KvEventsConfig
from headrace.core.messages.frontend import Abort, AddPrefill, Drain, QueryStats, Shutdown, StageLost, Submit
from headrace.core.messages.replies import EngineState, Tokens
from headrace.core.runtime.clock import VirtualClock
from headrace.core.stats import Counters, Sample, Stats
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.requests.request import FetchFrom, SamplingParams
from headrace.server.frontend.link.scheduler_client import LOST_S, SILENT_S
from headrace.server.frontend.request.generation_request import GenerationRequest, discard_events
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, Prefills, welcoming
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, make_config, running, saying


async def status(service: Service, path: str) -> tuple[int, str]:
    async with client(service) as http:
        response = await http.get(path)
        return response.status_code, json_of(response).get("error", {}).get("code", "")


@in_loop
async def test_before_the_start_and_while_loading(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.state = EngineState(ready=False, reason="loading weights")
    service = Service(link, make_config(tokenizer), tokenizer=tokenizer)
    assert await status(service, "/health") == (200, "")
    assert await status(service, "/ready") == (503, "not_ready")
    async with client(service) as http:
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "not_ready")
    async with running(link, tokenizer) as service:
        async with client(service) as http:
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        link.say(EngineState(ready=True))
        await service.readiness.wait_engine_ready()
        assert await status(service, "/ready") == (200, "")
        link.say(EngineState(ready=False, reason="stage 0 died"))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)
        assert service.readiness.not_ready() == ErrorInfo(
            code="not_ready", message="stage 0 died", status=503, retry_after_s=1.0
        )


@in_loop
async def test_a_silent_scheduler_is_unhealthy_until_it_answers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.frontend.link.scheduler_client.LATE_S", math.inf)  # of the loop of this test
    clock, link = VirtualClock(), FakeLink(answers_probes=False)
    async with running(link, tokenizer, clock=clock) as service:
        await link.wait_for(QueryStats)
        clock.advance(SILENT_S)
        assert await status(service, "/health") == (200, "")
        while await status(service, "/health") == (200, ""):  # what this loop is late by is taken off a silence
            clock.advance(0.1)
        clock.advance(1.0)
        assert await status(service, "/health") == (503, "unhealthy")
        assert await status(service, "/ready") == (503, "scheduler_silent")
        async with client(service) as http:
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
            assert (await http.get("/metrics")).status_code == 200
        link.answers_probes = True
        await link.wait_for(QueryStats, len(link.of(QueryStats)) + 1)
        while service.readiness.unhealthy():
            await asyncio.sleep(0)
        assert await status(service, "/health") == (200, "")


@in_loop
async def test_requests_fail_when_the_scheduler_is_lost(tokenizer: Tokenizer) -> None:
    clock, link = VirtualClock(), FakeLink(answers_probes=False)
    async with running(link, tokenizer, clock=clock) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await link.wait_for(Submit)
        clock.advance(LOST_S + 1)
        response = await asked
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "scheduler_silent")


@in_loop
async def test_drain_waits_for_open_requests_and_refuses_others(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        submit = await link.wait_for(Submit)
        draining = asyncio.create_task(service.drain(30))
        await link.wait_for(Drain)
        assert await status(service, "/ready") == (503, "draining")
        assert await status(service, "/health") == (200, "")
        refused = await http.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, json_of(refused)["error"]["code"]) == (503, "draining")
        assert not draining.done()
        for output in saying(tokenizer, "hello")(link, submit):
            link.say(output)
        await draining
        assert (await asked).status_code == 200
        assert link.of(Abort) == []


@in_loop
async def test_drain_aborts_what_is_open_at_the_deadline(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await link.wait_for(Submit)
        await service.drain(0.01)
        response = await asked
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "draining")
        (abort,) = link.of(Abort)
        assert abort.error.status == 503


@in_loop
async def test_a_draining_server_accepts_requests_for_the_length_of_the_grace(tokenizer: Tokenizer) -> None:
    link, over = FakeLink(saying(tokenizer, "hello")), asyncio.Event()
    async with running(link, tokenizer) as service, client(service) as http:
        draining = asyncio.create_task(service.drain(30, 2.0, over.set))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)
        assert await status(service, "/ready") == (503, "draining")
        assert await status(service, "/ping") == (503, "draining")
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        assert link.of(Drain) == []
        await over.wait()
        await link.wait_for(Drain)
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        await draining


@in_loop
async def test_a_server_that_is_not_ready_has_no_grace(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.state = EngineState(ready=False, reason="loading weights")
    async with running(link, tokenizer) as service:
        await asyncio.wait_for(service.drain(30, 3600), 20)


@in_loop
async def test_requests_end_at_once_and_none_begins_afterwards(tokenizer: Tokenizer) -> None:
    """Not even those that a decode server would compute itself where no prefill server does."""
    link, prefills = FakeLink(), Prefills()
    flags = {"role": "decode", "prefill": (ONE,), "fallback": "local", "prefill_transport": prefills}
    async with running(link, tokenizer, **flags) as service, client(service) as http:
        await link.wait_for(AddPrefill)
        welcoming(link, ONE)
        while not service.prefills.servers()[0].up:
            await asyncio.sleep(0)
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        submit = await link.wait_for(Submit)
        await service.end_requests()
        response = await asked
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "draining")
        assert response.headers["retry-after"] == "1"
        (abort,) = link.of(Abort)
        assert (abort.rid, abort.error.code) == (submit.rid, "draining")
        assert [type(submit.route) for submit in link.of(Submit)] == [FetchFrom]


@in_loop
async def test_stopping_fails_open_requests(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with client(service := Service(link, make_config(tokenizer), tokenizer=tokenizer)) as http:
        await service.start()
        await service.readiness.wait_engine_ready()
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await link.wait_for(Submit)
        await service.stage_lost(0, "gone")
        service.shut_down()
        assert (await link.wait_for(StageLost)) == StageLost(stage=0, message="gone")
        await link.wait_for(Shutdown)
        await service.stop()
        assert (await asked).status_code == 503
    assert link.closed


@in_loop
async def test_open_requests_are_bounded(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, max_queued_requests=1) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await link.wait_for(Submit)
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, json_of(response)["error"]["code"]) == (429, "queue_full")
        assert response.headers["retry-after"] == "1"
        asked.cancel()


@in_loop
async def test_the_rid_of_a_cancelled_request_stays_in_use_until_its_end(tokenizer: Tokenizer) -> None:
    class Slow(FakeLink):
        def send(self, message: object) -> None:
            if isinstance(message, Abort):
                self.sent.append(message)  # and answer it later
            else:
                super().send(message)  # type: ignore[arg-type]

    link = Slow()
    body = {"prompt": "x", "handoff": "none", "rid": "mine"}
    async with running(link, tokenizer) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/prefill", json=body))
        await link.wait_for(Submit)
        asked.cancel()
        while service.completions.open_requests:
            await asyncio.sleep(0)
        assert (await http.post("/v1/prefill", json=body)).status_code == 409
        link.say(Tokens(rid="mine", tokens=(99,)))
        link.say(finished("mine"))
        again = asyncio.create_task(http.post("/v1/prefill", json=body))
        while not again.done() and len(link.of(Submit)) < 2:
            await asyncio.sleep(0)
        if again.done():
            again = asyncio.create_task(http.post("/v1/prefill", json=body))
        await link.wait_for(Submit, 2)
        link.say(Tokens(rid="mine", tokens=(7,)))
        link.say(finished("mine"))
        assert json_of(await again)["first_token"]["id"] == 7, "not the late token of the first request"


@in_loop
async def test_metrics_of_a_server_in_use(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "hello"))
    counters = Counters()
    counters.add("generated_tokens_total", 12)
    link.stats = Stats((*counters.snapshot(), Sample("kv_pages", 7, ("leased",))))
    async with running(link, tokenizer) as service, client(service) as http:
        await http.post("/v1/completions", json={"prompt": "x"})
        await http.post("/v1/completions", json={"prompt": ""})
        await http.get("/nowhere")
        response = await http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert samples["headrace_generated_tokens_total", ()] == 12
    assert samples["headrace_kv_pages", ("leased",)] == 7
    assert samples["headrace_http_requests_total", ("/v1/completions", "200")] == 1
    assert samples["headrace_http_requests_total", ("/v1/completions", "400")] == 1
    assert samples["headrace_http_requests_total", ("other", "404")] == 1
    assert samples["headrace_time_to_first_token_seconds_count", ()] == 1
    assert samples["headrace_ready", ()] == 1
    assert [value for (name, _), value in samples.items() if name == "headrace_build_info"] == [1]


def test_a_service_that_has_not_started_refuses_requests(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        service = Service(FakeLink(), make_config(tokenizer))
        request = GenerationRequest(rid="r", prompt=(1,), sampling=SamplingParams())
        with pytest.raises(HeadraceError, match="loading"):
            await service.completions.complete(request, discard_events)

    asyncio.run(main())


@in_loop
async def test_where_routers_find_kv_events(tokenizer: Tokenizer) -> None:
    """The response of vLLM 0.32, by data-parallel rank; empty without KV events."""
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        assert (await http.get("/kv_event_sources")).json() == {}
    events = KvEventsConfig(host="0.0.0.0", port=5557, replay_port=5558, topic="kv", buffer=7)
    async with running(FakeLink(), tokenizer, kv_events=events) as service, client(service) as http:
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:5558",
            "buffer_steps": 7,
            "hwm": 7,
            "topic": "kv",
            "data_parallel_rank": 0,
            "block_size": service.config.engine.page_size,
            "block_hash": "headrace-kv-1",
        }
        assert (await http.get("/kv_event_sources")).json() == {"0": source}
