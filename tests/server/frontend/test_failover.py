"""Prompts that move to another prefill server before their first token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, PrefillState, RequestFailed, Reserved
from headrace.core.runtime.clock import Clock, VirtualClock
from headrace.core.types.errors import CANCELLED, PEER_GONE, ErrorInfo
from headrace.core.types.requests.request import DecodeHere
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ANSWER, Prefills, until_ready, welcoming
from tests.server.fakes import FakeLink, client, in_loop, json_of, reserving, running, saying
from tests.server.frontend.test_prefill_servers import prefill_of

URLS = tuple(f"http://p{number}:8001" for number in (1, 2, 3))
GONE = ErrorInfo(code=PEER_GONE, message="the prefill server is gone: silent", status=502, at_prefill=True)
OK = httpx.Response(200, json=ANSWER)

Answer = httpx.Response | Exception


def refusal(status: int, code: str, retry_after: str = "") -> httpx.Response:
    headers = {"Retry-After": retry_after} if retry_after else {}
    return httpx.Response(status, json={"error": {"code": code, "message": f"because of {code}"}}, headers=headers)


class Several(Prefills):
    """Three prefill servers with an answer of their own to prompts; None never answers."""

    def __init__(self, **answers: Answer | None) -> None:
        super().__init__()
        self.control_ports = {"p1": 5001, "p2": 5002, "p3": 5003}
        self.answers = answers
        self.accepted = asyncio.Event()
        self.left: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if request.url.path == "/v1/handoff":
            return await super().handle_async_request(request)
        self.posts.append((host, msgspec.json.decode(await request.aread()), request.headers))
        answer = self.answers.get(host, OK)
        if answer is None:
            self.accepted.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.append(host)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, httpx.Response)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    @property
    def hosts(self) -> list[str]:
        return [host for host, _, _ in self.posts]


@asynccontextmanager
async def three(
    tokenizer: Tokenizer, prefills: Several, up: tuple[str, ...] = URLS, clock: Clock | None = None, **server: Any
) -> AsyncIterator[tuple[FakeLink, httpx.AsyncClient, Service]]:
    """A decode server of three prefill servers, which it takes in turn. The KV comes where a prompt is answered."""
    link = FakeLink(reserving)

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        if isinstance(submit.route, DecodeHere):
            return list(saying(tokenizer, "hello")(link, submit))
        host = prefill_of(submit).removeprefix("http://").partition(":")[0]
        comes = prefills.answers.get(host, OK) is OK
        return [Reserved(rid=submit.rid), *(saying(tokenizer, "hello", cached=2)(link, submit) if comes else ())]

    link.script = script
    fields = {"role": "decode", "prefill": URLS, "prefill_transport": prefills, "routing": "least-load", **server}
    async with running(link, tokenizer, clock=clock, **fields) as service, client(service) as http:
        await link.wait_for(AddPrefill, 3)
        welcoming(link, *up)
        await until_ready(http)
        while sum(one.up for one in (service.prefills.servers() if service.prefills else ())) < len(up):
            await asyncio.sleep(0)
        yield link, http, service


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    text = (await http.get("/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("headrace_prefill_retr")]
    return {name.removeprefix("headrace_"): float(value) for name, _, value in lines if float(value)}


def moves(**reasons: int) -> dict[str, float]:
    return {f'prefill_retries_total{{reason="{reason}"}}': count for reason, count in reasons.items()}


MOVED: list[tuple[Answer, str]] = [
    (httpx.ConnectError("connection refused"), "unreachable"),
    (httpx.ReadError("connection reset"), "lost"),
    (httpx.RemoteProtocolError("Server disconnected"), "lost"),
    (refusal(429, "queue_full", "7"), "overloaded"),
    (refusal(503, "draining"), "unavailable"),
    (refusal(503, "stage_failed"), "lost"),
    (refusal(504, "no_peer"), "silent"),
    (refusal(401, "invalid_api_key"), "failed"),
    (refusal(500, "internal_error"), "failed"),
    (refusal(500, "nonfinite_values"), "nonfinite"),
    (httpx.Response(200, content=b"<html>"), "failed"),
]


@pytest.mark.parametrize(("answer", "reason"), MOVED, ids=lambda value: value if isinstance(value, str) else "")
@in_loop
async def test_the_client_sees_nothing_of_it(answer: Answer, reason: str, tokenizer: Tokenizer) -> None:
    async with three(tokenizer, Several(p1=answer)) as (link, http, _):
        response = await http.post("/v1/completions", json={"prompt": [1, 2, 3]})
        assert (response.status_code, json_of(response)["choices"][0]["text"]) == (200, "hello")
        assert json_of(response)["usage"]["prompt_tokens"] == 3
        assert await metrics(http) == moves(**{reason: 1}) | {'prefill_retried_requests_total{outcome="finished"}': 1}
        first, second = link.of(Submit)
        assert (prefill_of(first), prefill_of(second)) == URLS[:2]
        assert first.rid == second.rid
        assert first.route.ticket != second.route.ticket, "a ticket is used once"
        assert (first.moved, second.moved) == (False, True)
        assert first.prompt == second.prompt
        assert [abort.error.at_prefill for abort in link.of(Abort)] == [True]


@in_loop
async def test_a_stream_begins_with_the_first_token_and_has_one_text(tokenizer: Tokenizer) -> None:
    prefills = Several(p1=refusal(503, "draining"), p2=httpx.ReadError("reset"))
    async with three(tokenizer, prefills) as (_, http, _):
        text = (await http.post("/v1/completions", json={"prompt": [1, 2], "stream": True})).text
    chunks = [msgspec.json.decode(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "hello"
    assert "error" not in text
    assert prefills.hosts[:2] == ["p1", "p2"]


@pytest.mark.parametrize("status", [400, 413, 422])
@in_loop
async def test_errors_of_the_request_are_not_tried_elsewhere(status: int, tokenizer: Tokenizer) -> None:
    prefills = Several(p1=refusal(status, "no"))
    async with three(tokenizer, prefills) as (link, http, _):
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, json_of(response)["error"]["message"]) == (status, "because of no")
        assert len(link.of(Submit)) == 1
        assert await metrics(http) == {}


@in_loop
async def test_failures_of_this_server_are_not_tried_elsewhere(tokenizer: Tokenizer) -> None:
    """Its own full queue, drain and stages are the same whatever prefill server there is."""
    async with three(tokenizer, Several()) as (link, http, _):
        for status in (429, 503, 504, 502):
            own = ErrorInfo(code="own", message="own", status=status)
            link.script = lambda _link, submit, own=own: [RequestFailed(rid=submit.rid, error=own)]  # type: ignore[misc]
            before = len(link.of(Submit))
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == status
            assert len(link.of(Submit)) == before + 1


@in_loop
async def test_a_session_that_is_lost_leaves_nothing_open_at_the_old_server(tokenizer: Tokenizer) -> None:
    """What the scheduler reports moves a prompt as well; the POST to the old server ends, which cancels it there."""
    prefills = Several(p1=None)
    async with three(tokenizer, prefills) as (link, http, _):
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await prefills.accepted.wait()
        (submit,) = link.of(Submit)
        link.say(PrefillState(name=URLS[0], up=False, reason="silent"))
        link.say(RequestFailed(rid=submit.rid, error=GONE))
        assert json_of(await asked)["choices"][0]["text"] == "hello"
        assert prefills.left == ["p1"]
        assert prefills.hosts == ["p1", "p2"]


@in_loop
async def test_a_broken_connection_that_the_server_takes_for_a_client_who_left(tokenizer: Tokenizer) -> None:
    """The prefill server cancels, and its control endpoint says so before the connection's end is noticed here."""
    prefills = Several(p1=httpx.ReadError("reset"))
    cancelled = ErrorInfo(code=CANCELLED, message="the client disconnected", status=499, at_prefill=True)
    async with three(tokenizer, prefills) as (link, http, _):
        script = link.script

        def first_cancelled(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
            end = [RequestFailed(rid=submit.rid, error=cancelled)] if not submit.moved else []
            return [*script(link, submit), *end]

        link.script = first_cancelled
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
        prefills.answers["p1"] = refusal(499, CANCELLED)
        prefills.answers["p2"] = prefills.answers["p3"] = refusal(499, CANCELLED)
        before = len(link.of(Submit))
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 499, "cancelled by hand there"
        assert len(link.of(Submit)) == before + 1


@in_loop
async def test_all_of_them_are_named_once_each(tokenizer: Tokenizer) -> None:
    prefills = Several(p1=httpx.ReadError("reset"), p2=refusal(429, "queue_full", "5"), p3=refusal(503, "draining"))
    async with three(tokenizer, prefills) as (link, http, _):
        response = await http.post("/v1/completions", json={"prompt": "x"})
        expected = "p1:8001: ReadError reset; p2:8001: because of queue_full; p3:8001: because of draining"
        assert (response.status_code, json_of(response)["error"]["message"]) == (502, f"prefill servers {expected}")
        assert prefills.hosts == ["p1", "p2", "p3"]
        assert len({submit.route.ticket for submit in link.of(Submit)}) == 3
        counted = await metrics(http)
        assert counted == moves(lost=1, overloaded=1) | {'prefill_retried_requests_total{outcome="failed"}': 1}


@in_loop
async def test_all_overloaded_is_the_shortest_retry_after(tokenizer: Tokenizer) -> None:
    prefills = Several(**{f"p{n}": refusal(429, "queue_full", after) for n, after in ((1, "9"), (2, "4"), (3, "6"))})
    async with three(tokenizer, prefills) as (_, http, _):
        response = await http.post("/v1/completions", json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "4")


@in_loop
async def test_only_servers_that_are_up_are_tried(tokenizer: Tokenizer) -> None:
    prefills = Several(p1=refusal(503, "draining"))
    async with three(tokenizer, prefills, up=URLS[:1]) as (link, http, _):
        response = await http.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "draining")
        assert len(link.of(Submit)) == 1, "never twice at the same server"


@in_loop
async def test_later_prompts_avoid_a_server_that_failed(tokenizer: Tokenizer) -> None:
    """With --routing least-load, too: an idle server that fails everything would draw everything."""
    prefills = Several(p1=httpx.ConnectError("refused"))
    async with three(tokenizer, prefills, clock=VirtualClock()) as (_, http, _):
        for _ in range(3):
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    assert prefills.hosts.count("p1") == 1


class SlowRefusal(Several):
    """Time passes at the first server before it answers."""

    def __init__(self, clock: VirtualClock, seconds: float, **answers: Answer | None) -> None:
        super().__init__(**answers)
        self._clock = clock
        self._seconds = seconds

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.host == "p1" and request.url.path == "/v1/prefill":
            self._clock.advance(self._seconds)
        return await super().handle_async_request(request)


@pytest.mark.parametrize(
    ("answer", "objective"), [(refusal(429, "slo_unreachable"), 0.5), (httpx.ReadError("reset"), None)]
)
@in_loop
async def test_the_time_that_is_left_goes_on(answer: Answer, objective: float | None, tokenizer: Tokenizer) -> None:
    """An objective does not: a server that has lost the prompt had accepted it, so others are not to refuse it."""
    clock = VirtualClock()
    prefills = SlowRefusal(clock, 1.5, p1=answer)
    async with three(tokenizer, prefills, clock=clock) as (link, http, _):
        body = {"prompt": "x", "deadline_s": 4, "slo_ttft_ms": 2000}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        first, second = (submit.terms for submit in link.of(Submit))
        assert (first.deadline_s, second.deadline_s) == (4, 2.5)
        assert (first.slo_ttft_s, second.slo_ttft_s) == (2.0, objective)
        assert [sent["deadline_s"] for _, sent, _ in prefills.posts] == [4, 2.5]


@in_loop
async def test_a_deadline_that_has_passed_ends_it(tokenizer: Tokenizer) -> None:
    clock = VirtualClock()
    prefills = SlowRefusal(clock, 4.0, p1=httpx.ReadError("reset"))
    async with three(tokenizer, prefills, clock=clock) as (link, http, _):
        response = await http.post("/v1/completions", json={"prompt": "x", "deadline_s": 4})
        assert (response.status_code, json_of(response)["error"]["code"]) == (504, "deadline_exceeded")
        assert json_of(response)["error"]["message"] == "not done within the deadline of 4 s"
        assert len(link.of(Submit)) == 1


@in_loop
async def test_a_client_that_leaves_meanwhile_ends_it(tokenizer: Tokenizer) -> None:
    prefills = Several(p1=refusal(503, "draining"), p2=None)
    async with three(tokenizer, prefills) as (link, http, _):
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await prefills.accepted.wait()
        asked.cancel()
        assert (await link.wait_for(Abort, 2)).error.status == 499
        await asyncio.gather(asked, return_exceptions=True)
        assert len(link.of(Submit)) == 2
        assert (await metrics(http))['prefill_retried_requests_total{outcome="cancelled"}'] == 1


@in_loop
async def test_servers_that_the_request_names_are_its_own_matter(tokenizer: Tokenizer) -> None:
    async with three(tokenizer, Several()) as (link, http, _):
        link.script = lambda _link, submit: [RequestFailed(rid=submit.rid, error=GONE)]
        params = {"do_remote_prefill": True, "remote_host": "p1", "remote_port": 5001, "ticket": "t"}
        rooms = {"bootstrap_host": "p1", "bootstrap_port": 8001, "bootstrap_room": 5}
        for fields in ({"kv_transfer_params": params}, rooms):
            response = await http.post("/v1/completions", json={"prompt": "x", **fields})
            assert (response.status_code, json_of(response)["error"]["code"]) == (502, PEER_GONE)
        assert len(link.of(Submit)) == 2
        assert await metrics(http) == {}


@in_loop
async def test_local_fallback_comes_after_all_servers(tokenizer: Tokenizer) -> None:
    prefills = Several(**{f"p{number}": refusal(503, "draining") for number in (1, 2, 3)})
    async with three(tokenizer, prefills, fallback="local") as (link, http, _):
        assert json_of(await http.post("/v1/completions", json={"prompt": "x"}))["choices"][0]["text"] == "hello"
        assert len(link.of(Submit)) == 4
        assert prefills.hosts == ["p1", "p2", "p3"]


@in_loop
async def test_moves_are_logged_once_a_second_for_each_server_and_reason(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    prefills = Several(p1=refusal(429, "slo_unreachable"))
    async with three(tokenizer, prefills, clock=clock) as (_, http, _):
        for number in range(20):
            clock.advance(1.0 if number == 10 else 0.001)
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "moved from" in record.getMessage()]
    assert len(lines) == 2
    assert "http://p1:8001 to another one (overloaded: because of slo_unreachable)" in lines[0]
