"""A decode server behind routers, which have sent the prompts to prefill servers."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, ReleaseTicket, RemovePrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, EngineState, PrefillState, RequestFailed, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import DecodeHere, FetchFrom
from headrace.server.upstream.prefill_pool import MAX_NAMED
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ONE, Prefills, decode, fetched, welcoming
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, running, saying, ticket_of

HELD = {"do_remote_prefill": True, "remote_host": "p1", "remote_port": 5001, "ticket": "t"}
MOONCAKE = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": "http://p1:8001"}
ROOM = {"bootstrap_host": "p1", "bootstrap_port": 8001, "bootstrap_room": 7}


@pytest.mark.parametrize(
    ("fields", "ticket", "wait"),
    [
        ({"kv_transfer_params": HELD}, "t", False),
        ({"kv_transfer_params": {**HELD, "remote_host": "elsewhere", "remote_engine_id": "a" * 32}}, "t", False),
        ({"kv_transfer_params": MOONCAKE}, "x", True),
        (ROOM, "room:7", True),
        ({**ROOM, "bootstrap_host": "P1", "bootstrap_port": 8998}, "room:7", True),
        ({**ROOM, "bootstrap_port": None}, "room:7", True),
    ],
)
@in_loop
async def test_tickets_under_three_names(tokenizer: Tokenizer, fields: dict[str, Any], ticket: str, wait: bool) -> None:
    """Bootstrap ports are known from GET /v1/handoff; the instance id identifies a server under any host name."""
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    prefills.more = {"bootstrap_port": 8998}
    async with decode(link, tokenizer, prefills) as (_, http):
        response = await http.post("/v1/completions", json={"prompt": "hello world", "max_tokens": 9, **fields})
    assert response.status_code == 200, response.text
    assert json_of(response)["choices"][0]["text"] == "hello"
    (submit,) = link.of(Submit)
    assert submit.route == FetchFrom(ONE, ticket, "external" if wait else "done")
    assert prefills.posts == [], "the router has posted it"


@in_loop
async def test_without_handoff_fields_the_prompt_is_sent_from_here(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        await http.post("/v1/completions", json={"prompt": "hello", "kv_transfer_params": None})
    assert len(prefills.posts) == 1
    (submit,) = link.of(Submit)
    assert isinstance(submit.route, FetchFrom)
    assert submit.route.posting == "local"


@in_loop
async def test_where_nothing_is_transferred_the_prompt_is_computed_here(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        response = await http.post("/v1/completions", json={"prompt": "hi", **ROOM, "bootstrap_host": "2.2.2.2"})
    assert response.status_code == 200
    assert [submit.route for submit in link.of(Submit)] == [DecodeHere()]
    assert prefills.posts == []


@in_loop
async def test_every_prompt_of_a_list_has_its_own_ticket(tokenizer: Tokenizer) -> None:
    link = FakeLink(fetched(tokenizer))
    async with decode(link, tokenizer) as (_, http):
        body = {"prompt": ["ab", "hello"], "n": 2, "kv_transfer_params": {**HELD, "tickets": list("abcd")}}
        await http.post("/v1/completions", json=body)
        await http.post("/generate", json={"text": ["ab", "hello"], **ROOM, "bootstrap_room": [1, 2]})
    assert [ticket_of(submit) for submit in link.of(Submit)] == ["a", "b", "c", "d", "room:1", "room:2"]


@in_loop
async def test_the_prompt_is_the_one_that_was_computed(tokenizer: Tokenizer) -> None:
    """A chat template of another version would make another prompt of the same messages."""
    link = FakeLink(fetched(tokenizer))
    async with decode(link, tokenizer) as (_, http):
        params = {**HELD, "prompt_token_ids": [5, 6, 7]}
        chat = {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": params}
        assert (await http.post("/v1/chat/completions", json=chat)).status_code == 200
        params = {**params, "prompt_token_ids": [5, 10**6]}
        refused = await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params})
    assert list(unpack(link.of(Submit)[0].prompt)) == [5, 6, 7]
    assert (refused.status_code, json_of(refused)["error"]["code"]) == (400, "invalid_token")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ErrorInfo(code="prompt_too_long", message="m", status=400), 400),
        (ErrorInfo(code="queue_full", message="m", status=429, retry_after_s=3), 429),
        (ErrorInfo(code="draining", message="m", status=503), 503),
        (ErrorInfo(code="lease_expired", message="m", status=504), 504),
        (ErrorInfo(code="stage_failed", message="m", status=500), 500),
        (ErrorInfo(code="unknown_ticket", message="m", status=404), 502),
        (ErrorInfo(code="ticket_in_use", message="m", status=409), 502),
        (ErrorInfo(code="cancelled", message="m", status=499), 502),
    ],
)
@in_loop
async def test_what_a_failed_ticket_means_for_the_client(tokenizer: Tokenizer, error: ErrorInfo, status: int) -> None:
    link = FakeLink(lambda _link, submit: [RequestFailed(rid=submit.rid, error=error)])
    async with decode(link, tokenizer) as (_, http):
        response = await http.post("/v1/completions", json={"prompt": "x", **ROOM})
    assert (response.status_code, json_of(response)["error"]["code"]) == (status, error.code)
    assert response.headers.get("Retry-After") == ("3" if status == 429 else None)


@in_loop
async def test_a_fallback_serves_what_could_not_be_fetched(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="lease_expired", message="m", status=504)

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        if isinstance(submit.route, FetchFrom):
            return [RequestFailed(rid=submit.rid, error=error)]
        return saying(tokenizer, "hello")(link, submit)

    link = FakeLink(script)
    async with decode(link, tokenizer, fallback="local") as (_, http):
        answer = json_of(await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": HELD}))
    assert answer["choices"][0]["text"] == "hello"
    assert [type(submit.route) for submit in link.of(Submit)] == [FetchFrom, DecodeHere]


@pytest.mark.parametrize("min_tokens", [0, 2])
@in_loop
async def test_a_first_token_that_min_tokens_forbids_is_sampled_again(tokenizer: Tokenizer, min_tokens: int) -> None:
    """The router had asked the prefill server first, with limits that were not the client's."""
    eos = tokenizer.eos_ids[0]

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        if isinstance(submit.route, FetchFrom):
            return [Tokens(rid=submit.rid, tokens=(eos,)), finished(submit.rid, "stop")]
        return saying(tokenizer, "hello")(link, submit)

    link = FakeLink(script)
    async with decode(link, tokenizer) as (_, http):
        body = {"prompt": "x", "max_tokens": 4, "min_tokens": min_tokens, "kv_transfer_params": HELD}
        answer = json_of(await http.post("/v1/completions", json=body))
    routes = [type(submit.route) for submit in link.of(Submit)]
    text = answer["choices"][0]["text"]
    assert (routes, text) == (([FetchFrom, DecodeHere], "hello") if min_tokens else ([FetchFrom], ""))


@pytest.mark.parametrize(
    ("body", "tickets"),
    [
        ({"prompt": "x", "temperature": 9, **ROOM}, ["room:7"]),
        ({"prompt": ["x", 5], **ROOM}, ["room:7/0", "room:7/1"]),
        ({"prompt": "x", "temperature": "hot", "kv_transfer_params": HELD}, ["t"]),
        ({"prompt": "x", "temperature": 9, **ROOM, "bootstrap_host": "stranger"}, []),
        ({"prompt": "x", "temperature": 9, **ROOM, "bootstrap_room": "7"}, []),
    ],
)
@in_loop
async def test_the_prefill_server_is_notified_of_a_refused_request(
    tokenizer: Tokenizer, body: dict[str, Any], tickets: list[str]
) -> None:
    link = FakeLink()
    async with decode(link, tokenizer) as (_, http):
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        for index in range(len(tickets)):
            await link.wait_for(ReleaseTicket, index + 1)
    assert [(release.prefill, release.ticket) for release in link.of(ReleaseTicket)] == [(ONE, t) for t in tickets]


@in_loop
async def test_the_prefill_server_is_notified_of_overload_here(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with decode(link, tokenizer) as (service, http):
        link.say(EngineState(ready=False, reason="stage 0 died"))
        while service.readiness.not_ready() is None:
            await asyncio.sleep(0)
        response = await http.post("/v1/completions", json={"prompt": "x", **ROOM})
        assert response.status_code == 503
        assert (await link.wait_for(ReleaseTicket)).ticket == "room:7"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"kv_transfer_params": {**HELD, "remote_host": "10.0.0.9"}}, "10.0.0.9:5001"),
        ({"kv_transfer_params": {**HELD, "remote_port": 5002}}, "p1:5002"),
        ({"kv_transfer_params": {**MOONCAKE, "remote_bootstrap_addr": "http://stranger:1"}}, "stranger:1"),
        ({**ROOM, "bootstrap_host": "169.254.169.254", "bootstrap_port": 80}, "169.254.169.254:80"),
    ],
)
@in_loop
async def test_servers_that_are_not_allowed_are_not_connected_to(
    tokenizer: Tokenizer, fields: dict[str, Any], shown: str
) -> None:
    link, prefills = FakeLink(), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        asked = prefills.discoveries
        response = await http.post("/v1/completions", json={"prompt": "x", **fields})
    assert (response.status_code, json_of(response)["error"]["code"]) == (403, "prefill_not_allowed")
    assert shown in response.text
    assert (prefills.discoveries, len(link.of(AddPrefill)), link.of(Submit)) == (asked, 1, [])


@in_loop
async def test_a_configured_server_that_is_down_is_still_allowed(tokenizer: Tokenizer) -> None:
    """It is waited for, unless it is not there or does not fit."""
    link, prefills = FakeLink(), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        link.say(PrefillState(name=ONE, up=False, reason="dtype_mismatch: m", unfit=True))
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0)
        response = await http.post("/v1/completions", json={"prompt": "x", **ROOM})
    assert (response.status_code, "dtype_mismatch: m" in response.text) == (503, True)
    del prefills.control_ports["p1"]
    async with (
        running(link, tokenizer, role="decode", prefill=(ONE,), prefill_transport=prefills) as service,
        client(service) as http,
    ):
        response = await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": HELD})
    assert (response.status_code, json_of(response)["error"]["code"]) == (503, "no_prefill_server")


@pytest.mark.parametrize("new_port", [False, True])
@in_loop
async def test_a_prompt_at_a_server_that_has_just_started_again_waits_for_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, new_port: bool
) -> None:
    """Its router may know of the start before this server does, which asks again after a pause."""
    monkeypatch.setattr("headrace.server.upstream.prefill_pool.FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr("headrace.server.upstream.prefill_pool.LONGEST_PAUSE_S", 3600.0)
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (service, http):
        link.say(PrefillState(name=ONE, up=False, reason="silent for 3 s"))
        while service.prefills.servers()[0].up:
            await asyncio.sleep(0)
        prefills.instance, prefills.control_ports["p1"] = "b" * 32, 6001
        params = {"kv_transfer_params": {**HELD, "remote_port": 6001}} if new_port else ROOM
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", **params}))
        assert await link.wait_for(AddPrefill, 2) == AddPrefill(name=ONE, endpoint="tcp://p1:6001")
        welcoming(link, ONE)
        assert (await asking).status_code == 200


@in_loop
async def test_an_allowed_control_endpoint_is_connected_to_when_a_request_names_it(tokenizer: Tokenizer) -> None:
    link = FakeLink(fetched(tokenizer))
    async with decode(link, tokenizer, prefill=(), allow_prefill=("10.0.0.0/24",)) as (service, http):
        assert (await http.get("/ready")).status_code == 200, "no prefill server is required"
        params = {**HELD, "remote_host": "10.0.0.9", "remote_engine_id": "e"}
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params}))
        control_server = "tcp://10.0.0.9:5001"
        assert await link.wait_for(AddPrefill) == AddPrefill(name=control_server, endpoint=control_server)
        welcoming(link, control_server)
        assert (await asking).status_code == 200
        again = await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params})
        assert again.status_code == 200
        unnamed = await http.post("/v1/completions", json={"prompt": "x"})
        assert unnamed.status_code == 503, "prompts are sent to configured servers only"
    assert [submit.route for submit in link.of(Submit)] == [FetchFrom(control_server, "t", "done")] * 2
    assert len(link.of(AddPrefill)) == 1
    assert service.prefills.servers() == []


@in_loop
async def test_an_allowed_bootstrap_port_is_asked_where_the_control_endpoint_is(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills, prefill=(), allow_prefill=("p2",)) as (_, http):
        room = {**ROOM, "bootstrap_host": "p2", "bootstrap_port": 8998}
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", **room}))
        name = "http://p2:8998"
        assert await link.wait_for(AddPrefill) == AddPrefill(name=name, endpoint="tcp://p2:5002")
        welcoming(link, name)
        assert (await asking).status_code == 200


@pytest.mark.parametrize("rule", ["p2", "p2:8997", "p2:8998"])
@in_loop
async def test_the_api_key_goes_to_no_server_that_only_a_request_names_by_its_port(
    tokenizer: Tokenizer, rule: str
) -> None:
    """Another program may listen at another port of a host that is allowed."""
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    prefills.wants_key = "k"
    allowed = (rule, "p2")
    async with decode(link, tokenizer, prefills, prefill_api_key="k", prefill=(), allow_prefill=allowed) as (_, http):
        room = {**ROOM, "bootstrap_host": "p2", "bootstrap_port": 8998}
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", **room}))
        assert (await link.wait_for(AddPrefill)).endpoint == "tcp://p2:5002"
        welcoming(link, "http://p2:8998")
        assert (await asking).status_code == 200
    if rule == "p2:8998":
        assert prefills.keys == [("/v1/handoff", "Bearer k")]
    else:
        assert prefills.keys == [("/v1/handoff", None), ("/query", None)]


@in_loop
async def test_what_a_named_server_answers_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.upstream.prefill_pool.CONNECT_TIMEOUT_S", 0.05)
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    prefills.flood = True
    async with decode(link, tokenizer, prefills, prefill=(), allow_prefill=("p2",)) as (_, http):
        room = {**ROOM, "bootstrap_host": "p2", "bootstrap_port": 8998}
        response = await http.post("/v1/completions", json={"prompt": "x", **room})
        assert "more than 1048576 bytes" in json_of(response)["error"]["message"]


@in_loop
async def test_an_allowed_server_that_does_not_answer_is_given_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.upstream.prefill_pool.CONNECT_TIMEOUT_S", 0.05)
    link = FakeLink()
    async with decode(link, tokenizer, prefill=(), allow_prefill=("10.0.0.9",)) as (_, http):
        for _ in range(2):
            params = {**HELD, "remote_host": "10.0.0.9"}
            response = await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params})
            assert (response.status_code, json_of(response)["error"]["code"]) == (503, "no_prefill_server")
        await link.wait_for(RemovePrefill, 2)
    assert len(link.of(AddPrefill)) == 2
    assert link.of(Submit) == link.of(Abort) == []


@in_loop
async def test_servers_that_requests_have_named_are_bounded(tokenizer: Tokenizer) -> None:
    link = FakeLink(fetched(tokenizer))
    async with decode(link, tokenizer, prefill=(), allow_prefill=("10.0.0.9",)) as (_, http):
        for port in range(1, MAX_NAMED + 3):
            params = {**HELD, "remote_host": "10.0.0.9", "remote_port": port}
            asking = asyncio.create_task(
                http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": params})
            )
            added = await link.wait_for(AddPrefill, port)
            welcoming(link, added.name)
            assert (await asking).status_code == 200
        await link.wait_for(RemovePrefill, 2)
    assert [removed.name for removed in link.of(RemovePrefill)] == ["tcp://10.0.0.9:1", "tcp://10.0.0.9:2"]


BY_HEADER = {"x-prefiller-host-port": "p2:8000"}


@pytest.mark.parametrize("rule", ["p2", "p2:8000"])
@in_loop
async def test_a_header_names_the_server_that_the_prompt_is_posted_to(tokenizer: Tokenizer, rule: str) -> None:
    """As llm-d's sidecar is told. It gets the API key only if a rule names its port."""
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills, prefill_api_key="k", prefill=(), allow_prefill=(rule,)) as (_, http):
        asking = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}, headers=BY_HEADER))
        assert (await link.wait_for(AddPrefill)).endpoint == "tcp://p2:5002"
        welcoming(link, "http://p2:8000")
        assert (await asking).status_code == 200
        named = await http.post("/v1/completions", json={"prompt": "x", "kv_transfer_params": HELD}, headers=BY_HEADER)
        assert json_of(named)["error"]["code"] == "prefill_not_allowed", "what a body names goes first"
    (submit,) = link.of(Submit)
    assert isinstance(submit.route, FetchFrom)
    assert (submit.route.prefill, submit.route.posting) == ("http://p2:8000", "local")
    assert len(prefills.posts) == 1
    assert {key for _, key in prefills.keys} == ({"Bearer k"} if rule == "p2:8000" else {None})


@in_loop
async def test_a_configured_server_may_be_named_by_a_header_and_others_may_not(tokenizer: Tokenizer) -> None:
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        headers = {"x-prefiller-host-port": ONE.removeprefix("http://")}
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
        other = await http.post("/v1/completions", json={"prompt": "x"}, headers=BY_HEADER)
    assert (other.status_code, json_of(other)["error"]["code"]) == (403, "prefill_not_allowed")
    assert len(prefills.posts) == 1


@in_loop
async def test_what_is_wanted_if_it_is_available_is_computed_here(tokenizer: Tokenizer) -> None:
    """The scheduler decides, who knows what is cached; a colocated server takes no notice."""
    headers = {"Prefer": "if-available"}
    link, alone, prefills = FakeLink(saying(tokenizer, "hello")), FakeLink(saying(tokenizer, "hello")), Prefills()
    async with decode(link, tokenizer, prefills) as (_, http):
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
    async with running(alone, tokenizer) as service, client(service) as http:
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)).status_code == 200
    found = [(submit.route, submit.terms.uncached_limit) for submit in (*link.of(Submit), *alone.of(Submit))]
    assert found == [(DecodeHere(), 64), (DecodeHere(), None)]
    assert prefills.posts == []
