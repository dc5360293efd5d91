"""A prefill server behind routers: what it computes, what it responds, and which peers it notifies of refusals."""

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from headrace.core.messages.frontend import Abort, RefuseTicket, Submit
from headrace.core.messages.replies import AnySchedulerReply, EngineState, Held, RequestFailed, Tokens
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import pack, prompt_hash, unpack
from headrace.core.types.requests.request import Discard, SendTo, Timing, Usage
from headrace.server.frontend.link.control_address import reachable_host
from headrace.server.http.body import SMALL
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, finished, in_loop, json_of, made_up_logprob, running, ticket_of

NIXL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_host": None}
ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
PROMPT = "hello world"


def computing(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """Held if the request asks for that, sent to a peer otherwise."""
    logprobs = () if submit.sampling.logprobs is None else (made_up_logprob(7, submit.sampling.logprobs),)
    yield Tokens(rid=submit.rid, tokens=(7,), logprobs=logprobs)
    count = len(submit.prompt) // 4
    if isinstance(submit.route, SendTo) and submit.route.hold:
        yield Held(rid=submit.rid, lease_s=30.0, usage=Usage(count, 1, 1), timing=Timing())
    else:
        yield finished(submit.rid, "handoff", prompt=count, cached=1)


async def ask(http: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> Any:
    body = {"prompt": PROMPT} if path == "/v1/completions" else {}
    response = await http.post(path, json={**body, **fields})
    assert response.status_code == 200, response.text
    return json_of(response)


@in_loop
async def test_a_router_that_asks_here_first_learns_where_the_kv_is(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = await ask(http, max_tokens=1, min_tokens=1, kv_transfer_params=NIXL)
    (submit,) = link.of(Submit)
    ids = tokenizer.encode(PROMPT)
    params = answer["kv_transfer_params"]
    assert (submit.route, list(unpack(submit.prompt))) == (SendTo(params["ticket"], hold=True), ids)
    assert {key: params[key] for key in ("do_remote_prefill", "do_remote_decode", "tp_size")} == {
        "do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1,
    }  # fmt: skip
    assert (params["remote_host"], params["remote_port"], params["remote_engine_id"]) == ("127.0.0.1", 5555, "i" * 32)
    assert params["remote_request_id"] == params["ticket"]
    assert (params["tickets"], params["prompt_token_ids"], params["remote_num_tokens"]) == ([params["ticket"]], ids, 2)
    assert params["prompt_hashes"] == [prompt_hash(pack(ids))]
    assert (params["fingerprint"], params["protocol"], params["lease_s"]) == ("fp", 1, 30.0)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == tokenizer.decode([7])
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert link.of(Abort) == [], "held requests outlive their answers"


@in_loop
async def test_limits_that_a_router_sets_are_not_the_clients(tokenizer: Tokenizer) -> None:
    """One router sends min_tokens above max_tokens."""
    link = FakeLink(computing)
    limits = {"max_tokens": 1, "min_tokens": 3, "stop": "x", "stop_token_ids": [3]}
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        await ask(http, **limits, logprobs=2, temperature=0, seed=4, kv_transfer_params=NIXL)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 1}
        await ask(http, "/v1/chat/completions", **chat, kv_transfer_params=NIXL)
        await ask(http, "/generate", text=PROMPT, sampling_params={"max_new_tokens": 1}, kv_transfer_params=NIXL)
    for submit in link.of(Submit):
        assert submit.sampling.max_tokens > 1, "a sole token is never handed over"
        assert (submit.sampling.min_tokens, submit.sampling.stop_token_ids) == (0, ())
    first = link.of(Submit)[0].sampling
    assert (first.logprobs, first.temperature, first.seed) == (2, 0, 4)


@in_loop
async def test_what_a_router_asks_of_both_sides_keeps_its_limits(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = await ask(http, max_tokens=5, min_tokens=2, stream=True, **ROOM)
    (submit,) = link.of(Submit)
    assert submit.route == SendTo("room:7")
    assert (submit.sampling.max_tokens, submit.sampling.min_tokens) == (5, 2)
    assert submit.sampling.stop_token_ids == tokenizer.eos_ids
    assert answer["choices"][0]["finish_reason"] == "length", "and it is never a stream"
    assert "kv_transfer_params" not in answer


@in_loop
async def test_a_list_of_prompts_has_a_ticket_for_each_continuation(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        fields: dict[str, Any] = {"prompt": ["ab", "hello"], "n": 2, "seed": 1}
        answer = await ask(http, **fields, kv_transfer_params={**NIXL, "transfer_id": "x"})
        await ask(http, **fields, **{**ROOM, "bootstrap_room": [7, 8], "bootstrap_host": ["p", "2.2.2.2"]})
    params = answer["kv_transfer_params"]
    assert params["tickets"] == ["x/0", "x/1", "x/2", "x/3"]
    assert params["remote_num_tokens"] == [2, 2, 1, 1]
    assert params["prompt_token_ids"] == [tokenizer.encode("ab"), tokenizer.encode("hello")]
    one, other = (prompt_hash(pack(ids)) for ids in params["prompt_token_ids"])
    assert params["prompt_hashes"] == [one, one, other, other]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    submits = {ticket_of(submit): submit for submit in link.of(Submit)[:4]}
    assert submits["x/0"].sampling.seed != submits["x/1"].sampling.seed
    rooms = [submit.route for submit in link.of(Submit)[4:]]
    assert sorted(rooms, key=str) == [Discard(), Discard(), SendTo("room:7/0"), SendTo("room:7/1")]


def test_a_control_endpoint_on_all_addresses_is_reached_under_the_requested_host() -> None:
    assert reachable_host("10.0.0.5", "prefill-0") == "10.0.0.5"
    assert [reachable_host(host, "prefill-0") for host in ("0.0.0.0", "::")] == ["prefill-0"] * 2


@in_loop
async def test_when_one_prompt_fails_the_others_are_cancelled(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="stage_failed", message="stage 0 died", status=503)

    def script(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        if ticket_of(submit) == "x/1":
            asyncio.get_running_loop().call_later(0.05, link.say, RequestFailed(rid=submit.rid, error=error))
            return []
        return computing(link, submit)

    link = FakeLink(script)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        body = {"prompt": ["ab", "hello"], "kv_transfer_params": {**NIXL, "transfer_id": "x"}}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 503
        held = next(submit for submit in link.of(Submit) if ticket_of(submit) == "x/0")
        assert (await link.wait_for(Abort)).rid == held.rid


@pytest.mark.parametrize(
    ("path", "body", "status", "tickets"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 9, **ROOM}, 400, ["room:7"]),
        ("/v1/completions", {"prompt": "x" * 99, **ROOM}, 400, ["room:7"]),
        ("/v1/completions", {"prompt": "x", "model": "other", **ROOM}, 404, ["room:7"]),
        ("/v1/completions", {"prompt": ["x", ""], **ROOM}, 400, ["room:7/0", "room:7/1"]),
        ("/v1/completions", {"prompt": [[1], [2]], "n": 99, **ROOM, "bootstrap_room": [7, 8]}, 400, None),
        ("/v1/chat/completions", {"messages": "x", **ROOM}, 400, ["room:7"]),
        ("/v1/chat/completions", {"messages": [], **ROOM, "bootstrap_host": "2.2.2.2"}, 400, []),
        ("/generate", {"text": ["x", "y"], "sampling_params": {"top_p": 7}, **ROOM}, 400, ["room:7/0", "room:7/1"]),
        ("/v1/completions", {"prompt": 5, "kv_transfer_params": {**NIXL, "transfer_id": "x"}}, 400, ["x"]),
        ("/v1/completions", {"prompt": 5, "kv_transfer_params": NIXL}, 400, []),
        ("/v1/prefill", {"prompt": "x", "ticket": "t", "temperature": 9}, 400, ["t"]),
        ("/v1/prefill", {"prompt": "x", "ticket": "t", "unknown": 9}, 400, ["t"]),
        ("/v1/prefill", {"prompt": "x", "ticket": 5}, 400, []),
    ],
)
@in_loop
async def test_the_peer_that_waits_for_a_refused_prompt_is_notified(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], status: int, tickets: list[str] | None
) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        response = await http.post(path, json=body)
        assert response.status_code == status, response.text
        told = [await link.wait_for(RefuseTicket, index + 1) for index in range(len(tickets or ()))]
    assert link.of(Submit) == []
    if tickets is not None:
        assert [refusal.ticket for refusal in link.of(RefuseTicket)] == tickets
    error = json_of(response)["error"]
    assert all((refusal.error.message, refusal.error.status) == (error["message"], status) for refusal in told)


@pytest.mark.parametrize("names_at", [SMALL - 3, SMALL, 3 * SMALL - 1])
@in_loop
async def test_the_peer_of_a_large_refused_body_is_notified(tokenizer: Tokenizer, names_at: int) -> None:
    """Such bodies are searched for tickets in steps, and a name may begin in one and end in the next."""
    prompt = b'{"prompt":"%s",' % (b"x" * (names_at - len('{"prompt":"",')))
    body = prompt + b'"bootstrap_room":7}'
    assert body.index(b"bootstrap_") == names_at + 1
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.post("/v1/completions", content=body)).status_code == 400
        assert (await link.wait_for(RefuseTicket)).ticket == "room:7"


@in_loop
async def test_a_peer_is_notified_of_overload_too(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.state = EngineState(ready=False, reason="stage 0 is loading")
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", **ROOM})
        refusal = await link.wait_for(RefuseTicket)
    assert response.status_code == 503
    assert (refusal.ticket, refusal.error.code) == ("room:7", "not_ready")


@in_loop
async def test_a_body_that_is_not_json_notifies_no_peer(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/prefill"):
            assert (await http.post(path, content=b'{"bootstrap_room": 7')).status_code == 400
    assert link.of(RefuseTicket) == []


@in_loop
async def test_a_prefill_server_does_not_decode(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer, role="prefill") as service, client(service) as http:
        bodies = {
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/generate": {"text": "x"},
        }
        for path, body in bodies.items():
            response = await http.post(path, json=body)
            assert response.status_code == 404
            assert json_of(response)["error"]["code"] == "wrong_role"
            assert "kv_transfer_params.do_remote_decode" in response.text
