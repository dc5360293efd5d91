"""What the front end adds to the scheduler's status: one question for all viewers, last requests, errors, peers."""

import asyncio
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import QueryStatus
from headrace.core.messages.replies import EngineState, PrefillState, StageDown, StatusReply
from headrace.core.runtime.clock import VirtualClock
from headrace.core.status import PeerLink, PeerNote, SchedulerStatus
from headrace.core.types.errors import ErrorInfo
from headrace.server.frontend.status.recent_events import MAX_EVENTS, MAX_REQUESTS, RecentEvents, first_tokens
from headrace.server.frontend.status.server_status import FRESH_S, StatusQuery
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, decode, until_ready
from tests.server.fakes import FakeLink, client, failing, in_loop, running, saying


async def status_of(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/status")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@in_loop
async def test_viewers_share_a_question_and_a_fresh_answer() -> None:
    clock, posted = VirtualClock(), list[QueryStatus]()
    query = StatusQuery(posted.append, clock)  # type: ignore[arg-type]
    asked = [asyncio.create_task(query.ask()) for _ in range(5)]
    while not posted:
        await asyncio.sleep(0)
    query.take(StatusReply(token=posted[0].token, status=SchedulerStatus(plans_in_flight=2)))
    answers = await asyncio.gather(*asked)
    assert [found.status.plans_in_flight for found in answers if found is not None] == [2] * 5
    await query.ask()
    assert len(posted) == 1
    clock.advance(FRESH_S + 0.1)
    again = asyncio.create_task(query.ask())
    await asyncio.sleep(0)
    query.take(StatusReply(token=posted[1].token, status=SchedulerStatus(plans_in_flight=3)))
    found = await again
    assert found is not None
    assert (found.status.plans_in_flight, len(posted)) == (3, 2)


@in_loop
async def test_a_scheduler_that_does_not_answer_is_asked_once_and_its_last_answer_shown() -> None:
    clock, posted = VirtualClock(), list[QueryStatus]()
    query = StatusQuery(posted.append, clock, timeout_s=0.01)  # type: ignore[arg-type]
    assert await query.ask() is None
    assert await query.ask() is None
    assert len(posted) == 1
    query.take(StatusReply(token=posted[0].token, status=SchedulerStatus()))
    clock.advance(7)
    found = await query.ask()
    assert found is not None
    assert (found.age_s, len(posted)) == (7, 2)


@in_loop
async def test_a_request_that_ends_well_is_listed_with_its_times(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(saying(tokenizer, "hello")), tokenizer) as service, client(service) as http:
        await http.post("/v1/completions", json={"prompt": [1, 2, 3]}, headers={"X-Request-Id": "order-7"})
        status = await status_of(http)
    (one,) = status["recent"]
    fields = one["fields"]
    assert (fields["id"], fields["outcome"], fields["prompt"], fields["generated"]) == ("order-7", "length", 3, 1)
    assert 0 <= one["ago_s"] < 30
    first = status["first_token"]
    assert first["requests"] == 1
    assert [part["part"] for part in first["parts"]] == ["queue", "forward", "other"]
    assert first["parts"][1]["p50_s"] == fields["forward_s"] == 0.0303
    assert status["ready"] is True


@in_loop
async def test_errors_are_counted_together_and_the_last_one_is_shown(tokenizer: Tokenizer) -> None:
    link = FakeLink(failing(ErrorInfo(code="peer_gone", message="the peer is gone", status=502)))
    async with running(link, tokenizer) as service, client(service) as http:
        for _ in range(3):
            await http.post("/v1/completions", json={"prompt": [1, 2, 3]})
        status = await status_of(http)
    (event,) = [event for event in status["events"] if event["level"] == "error"]
    assert (event["source"], event["count"]) == ("/v1/completions", 3)
    assert event["text"] == "peer_gone: the peer is gone"
    assert [one["fields"]["outcome"] for one in status["recent"]] == ["peer_gone"] * 3


@in_loop
async def test_stages_that_fail_and_come_back(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer) as service, client(service) as http:
        for reason in ("exited with status -9", "has been silent for 1.3 s", "exited with status -9"):
            link.say(StageDown(stage=0, message=reason, epoch=0))
        link.say(EngineState(ready=False, reason="stage 0 failed: exited with status -9"))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)
        down = await status_of(http)
        link.say(EngineState(ready=True))
        await service.readiness.wait_engine_ready()
        up = await status_of(http)
    assert (down["ready"], down["restarts"], up["restarts"]) == (False, 0, 1)
    assert down["reason"] == "stage 0 failed: exited with status -9"
    assert down["events"][0]["text"] == "stage 0 failed: exited with status -9"
    assert up["ready"] is True
    assert (up["events"][0]["text"], up["events"][0]["level"]) == ("all stages are up again", "info")


@in_loop
async def test_peers_of_a_prefill_server_that_are_and_were_connected(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.status = SchedulerStatus(
        peers=(PeerLink(name="here", role="decode", up=True, backend="shm", requests=2, joined_s=5.0),),
        notes=(
            PeerNote(1.0, "gone", False, "silent for 3 s"),
            PeerNote(5.0, "here", True, "KV moves by shm"),
            PeerNote(6.0, "here", False, "it said goodbye"),
        ),
    )
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        status = await status_of(http)
    found = [(peer["name"], peer["up"], peer["backend"], peer["note"]) for peer in status["peers"]]
    assert found == [("here", True, "shm", ""), ("gone", False, "", "silent for 3 s")]
    texts = {event["text"] for event in status["events"] if event["source"] == "peer"}
    assert texts == {
        "gone is gone: silent for 3 s", "here is connected; KV moves by shm", "here is gone: it said goodbye"
    }  # fmt: skip


@in_loop
async def test_a_prefill_server_that_is_still_starting_is_no_error(tokenizer: Tokenizer) -> None:
    async def level(http: httpx.AsyncClient) -> tuple[str, str]:
        event = (await status_of(http))["events"][0]
        return event["level"], event["text"]

    async with decode(link := FakeLink(), tokenizer, up=False) as (service, http):
        link.say(PrefillState(name=ONE, up=False, reason="still loading"))
        while not service.recent.events(0.0):
            await asyncio.sleep(0)
        assert await level(http) == ("info", f"{ONE} is down: still loading")
        link.say(PrefillState(name=ONE, up=True))
        await until_ready(http)
        assert await level(http) == ("info", f"{ONE} is up")
        (peer,) = (await status_of(http))["peers"]
        assert (peer["name"], peer["role"], peer["up"], peer["note"]) == (ONE, "prefill", True, "")
        link.say(PrefillState(name=ONE, up=False, reason="silent for 3 s"))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)
        assert await level(http) == ("error", f"{ONE} is down: silent for 3 s")
        (peer,) = (await status_of(http))["peers"]
        assert (peer["up"], peer["note"]) == (False, "silent for 3 s")


@in_loop
async def test_secrets_are_not_shown(tokenizer: Tokenizer) -> None:
    keys = {"api_keys": ("hunter2",), "tenant_keys": ("anna=letmein",), "prefill_api_key": "opensesame"}
    headers = {"Authorization": "Bearer hunter2"}
    async with running(FakeLink(), tokenizer, **keys) as service, client(service) as http:
        answer = await http.get("/status", headers=headers)
    settings = {one["key"]: one["value"] for one in answer.json()["config"]}
    assert settings["api-key"] == "set, not shown"
    assert settings["stage-key"] == ""
    assert not any(secret in answer.text for secret in ("hunter2", "letmein", "opensesame"))


def test_a_flood_of_refusals_displaces_no_request_and_no_error() -> None:
    recent = RecentEvents()
    recent.ended({"id": "a", "route": "/v1/completions", "outcome": "length"}, True, False, 1.0)
    recent.note("stages", "x", "stage 0 failed", 1.0, level="error")
    refused = {"route": "/v1/completions", "outcome": "queue_full", "error": "y" * 5000, "status": 429}
    for at in range(1000):
        recent.ended(refused, False, False, float(at))
    assert [one.fields["id"] for one in recent.requests(1000.0)] == ["a"]
    flood, failure = recent.events(1000.0)
    assert (flood.count, flood.ago_s, failure.text) == (1000, 1.0, "stage 0 failed")
    assert len(flood.text) < 600


def test_what_is_kept_is_bounded() -> None:
    recent = RecentEvents()
    for number in range(200):
        recent.ended({"route": "/", "outcome": f"code {number}"}, True, True, float(number))
    assert (len(recent.requests(200.0)), len(recent.events(200.0))) == (MAX_REQUESTS, MAX_EVENTS)
    assert recent.requests(200.0)[0].fields["outcome"] == "code 199"


def test_parts_of_the_time_to_first_token() -> None:
    recent = RecentEvents()
    for number in range(21):
        fields = {"ttft_s": 0.1 * number, "queue_s": 0.04 * number, "forward_s": 0.05 * number}
        recent.ended(fields, True, False, 0.0)
    recent.ended({"id": "refused later", "route": "r", "outcome": "x"}, True, False, 0.0)
    found = first_tokens(recent.requests(0.0), ("queue_s", "forward_s"))
    assert found.requests == 21
    assert found.ttft is not None
    assert (found.ttft.p50_s, found.ttft.p95_s) == pytest.approx((1.0, 1.9))
    medians = {part.part: part.p50_s for part in found.parts}
    assert medians == pytest.approx({"queue": 0.4, "forward": 0.5, "other": 0.1})
