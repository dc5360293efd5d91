"""POST /v1/prefill, its events, DELETE, GET /v1/handoff."""

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.config import KvEventsConfig
from headrace.core.messages.frontend import Abort, Submit
from headrace.core.messages.replies import AnySchedulerReply, Held, Progress, Tokens
from headrace.core.stats import Sample, Stats
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.request import Discard, SendTo, Timing, TokenLogprob, Usage
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import (
    FakeLink,
    client,
    failing,
    finished,
    in_loop,
    json_of,
    logprob_parts,
    made_up_logprob,
    running,
    saying,
)


def handing_over(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
    """A prefill scheduler's replies to a request whose KV a peer has fetched."""
    rid, total = submit.rid, len(submit.prompt) // 4
    return [
        Progress(rid=rid, phase="bootstrapped", done=0, total=total),
        Progress(rid=rid, phase="computing", done=2, total=total),
        Progress(rid=rid, phase="computing", done=total, total=total),
        Progress(rid=rid, phase="transferring", done=total, total=total),
        Tokens(rid=rid, tokens=(7,), logprobs=() if submit.sampling.logprobs is None else (made_up_logprob(7, 2),)),
        *logprob_parts(rid, [] if submit.sampling.prompt_logprobs is None else [TokenLogprob(5, -1.5)]),
        finished(rid, "handed_over", prompt=total, cached=1),
    ]


def sse(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), msgspec.json.decode(data.removeprefix("data: "))))
    return found


@in_loop
async def test_a_prefill_for_a_peer(tokenizer: Tokenizer) -> None:
    link = FakeLink(handing_over)
    body = {"prompt": "hello world", "ticket": "t1", "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 50}
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/prefill", json=body))
    (submit,) = link.of(Submit)
    assert (submit.route, submit.progress) == (SendTo("t1"), False)
    assert list(unpack(submit.prompt)) == tokenizer.encode("hello world")
    assert answer["rid"] == submit.rid
    assert answer["rid"].startswith("pf-")
    assert (answer["ticket"], answer["model"], answer["finish_reason"]) == ("t1", "tiny", None)
    assert answer["first_token"]["id"] == 7
    assert [top["id"] for top in answer["first_token"]["top_logprobs"]] == [7, 8]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 1}
    assert answer["handoff"] == {"pages": 2, "bytes": 4096, "chunks": 1}
    assert answer["timing_ms"] == {"queue": 2.2, "bootstrap": 10.1, "forward": 30.3, "transfer": 4.4, "total": 47.0}
    assert answer["prompt_logprobs"][0] is None
    assert (answer["prompt_logprobs"][1]["id"], answer["prompt_logprobs"][1]["logprob"]) == (5, -1.5)


@pytest.mark.parametrize(
    "prompt", [{"prompt_token_ids": [1, 2, 3]}, {"messages": [{"role": "user", "content": "x"}]}, {"prompt": "x"}]
)
@in_loop
async def test_a_prefill_without_a_peer(tokenizer: Tokenizer, prompt: dict[str, object]) -> None:
    for role in ("prefill", "colocated"):
        link = FakeLink(saying(tokenizer, "<eos>", reason="stop"))
        async with running(link, tokenizer, role=role) as service, client(service) as http:
            answer = json_of(await http.post("/v1/prefill", json={**prompt, "handoff": "none", "rid": "mine"}))
        assert link.of(Submit)[0].route == Discard()
        assert (answer["rid"], answer["ticket"], answer["finish_reason"]) == ("mine", None, "stop")
        assert answer["first_token"] == {"id": 267, "text": "<eos>", "logprob": None, "top_logprobs": None}
        assert answer["prompt_logprobs"] is None


@pytest.mark.parametrize("more", [{"ticket": "t1"}, {"handoff": "none"}, {"handoff": "hold", "ticket": "t1"}])
@in_loop
async def test_the_kv_of_a_prompt_alone(tokenizer: Tokenizer, more: dict[str, object]) -> None:
    """Whatever token would follow: nothing of the body may end the request with it."""
    link = FakeLink(held if more.get("handoff") == "hold" else handing_over)
    ends = {"stop": "x", "stop_token_ids": [7], "logprobs": 1}
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/prefill", json={"prompt": "hi", "max_tokens": 0, **ends, **more}))
        streamed = {"prompt": "hi", "max_tokens": 0, "stream": True, **more}
        name, done = sse((await http.post("/v1/prefill", json=streamed)).text)[-1]
    for submit in link.of(Submit):
        assert (submit.sampling.max_tokens, submit.sampling.stop_token_ids) == (2, ())
    assert name == "done"
    for each in (answer, done):
        assert (each["first_token"], each["finish_reason"]) == (None, None)
        assert each["usage"]["completion_tokens"] == 0
        assert each["usage"]["prompt_tokens"] > 0


@in_loop
async def test_the_events_of_a_streamed_prefill(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(handing_over), tokenizer, role="prefill") as service, client(service) as http:
        body = {"prompt": "hello world!", "ticket": "t", "rid": "r"}
        plain = json_of(await http.post("/v1/prefill", json=body))
        found = sse((await http.post("/v1/prefill", json={**body, "stream": True})).text)
    assert [name for name, _ in found] == ["bootstrapped", "progress", "progress", "transferring", "done"]
    assert found[1][1] == {"rid": "r", "done": 2, "total": 3}
    assert found[-1][1] == plain


@in_loop
async def test_errors_of_a_streamed_prefill(tokenizer: Tokenizer) -> None:
    error = ErrorInfo(code="peer_gone", message="gone", status=502)

    def script(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
        return [*handing_over(link, submit)[:2], *failing(error)(link, submit)]

    body = {"prompt": "x", "ticket": "t", "stream": True}
    async with running(FakeLink(script), tokenizer, role="prefill") as service, client(service) as http:
        (_, _, (name, data)) = sse((await http.post("/v1/prefill", json=body)).text)
    assert name == "error"
    assert data["error"] == {
        "message": "gone",
        "type": "server_error",
        "param": None,
        "code": "peer_gone",
        "status": 502,
    }
    async with running(FakeLink(failing(error)), tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.post("/v1/prefill", json=body)).status_code == 502


@in_loop
async def test_delete_cancels_an_open_request_once(tokenizer: Tokenizer) -> None:
    link = FakeLink()  # never answers a prompt
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        body = {"prompt": "x", "ticket": "t", "rid": "mine"}
        asked = asyncio.create_task(http.post("/v1/prefill", json=body))
        await link.wait_for(Submit)
        again = await http.post("/v1/prefill", json=body)
        assert (again.status_code, json_of(again)["error"]["param"]) == (409, "rid")
        cancelled = await http.delete("/v1/prefill/mine")
        assert (cancelled.status_code, json_of(cancelled)) == (200, {"cancelled": True})
        response = await asked
        assert (response.status_code, json_of(response)["error"]["code"]) == (499, "cancelled")
        assert (await http.delete("/v1/prefill/mine")).status_code == 404
    (abort,) = link.of(Abort)
    assert (abort.rid, abort.error.status, abort.finish) == ("mine", 499, False)


@in_loop
async def test_late_messages_of_an_ended_request_do_not_reach_the_next_one_with_its_rid(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        body = {"prompt": "x", "handoff": "none", "rid": "mine"}
        asked = asyncio.create_task(http.post("/v1/prefill", json=body))
        await link.wait_for(Submit)
        link.say(Tokens(rid="mine", tokens=(7,)))
        link.say(finished("mine"))
        assert (await asked).status_code == 200
        link.say(finished("mine"))
        asked = asyncio.create_task(http.post("/v1/prefill", json=body))
        await link.wait_for(Submit, 2)
        link.say(Tokens(rid="mine", tokens=(8,)))
        link.say(finished("mine"))
        assert json_of(await asked)["first_token"]["id"] == 8
    assert link.of(Abort) == []


@in_loop
async def test_decode_servers_find_the_control_endpoint(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role="prefill", api_keys=("k",)) as service, client(service) as http:
        assert (await http.get("/v1/handoff")).status_code == 401
        answer = await http.get("/v1/handoff", headers={"Authorization": "Bearer k"})
        assert json_of(answer) == {
            "protocol": [1],
            "instance": "i" * 32,
            "control_port": 5555,
            "bootstrap_port": 0,
            "model": "tiny",
            "fingerprint": "fp",
            "page_size": 16,
            "kv_cache": {"dtype": "float32", "layers": 4, "kv_heads": 2, "head_dim": 8},
            "structured_outputs": True,
            "penalties": True,
            "hidden_states": True,
            "prompt_logprobs_start": True,
            "kv_hints": True,
            "session_id": True,
            "images": False,
            "prefixes": True,
            "computation": None,
            "resume": False,
            "kv_events": None,
            "load": None,
        }
    link = FakeLink()
    link.info = link.state = None
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        response: httpx.Response = await http.get("/v1/handoff")
        assert (response.status_code, json_of(response)["error"]["code"]) == (503, "not_ready")


@in_loop
async def test_decode_servers_learn_what_they_choose_a_server_by(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.stats = Stats(
        (
            Sample("unplanned_seconds", 2.5),
            Sample("prefill_cost_seconds", 1e-4, ("token",)),
            Sample("prefill_cost_seconds", 3e-10, ("squared_token",)),
            Sample("cost_model_trusted", 1.0),
            Sample("delayed_requests", 2.0, ("64",)),
            Sample("delayed_requests", 0.5, ("65536",)),
            Sample("predicted_wait_seconds", 0.5, ("64",)),
            Sample("predicted_wait_seconds", 9.0, ("65536",)),
        )
    )
    events = KvEventsConfig(port=5557, replay_port=5558, topic="kv")
    async with running(link, tokenizer, role="prefill", kv_events=events) as service, client(service) as http:
        found = json_of(await http.get("/v1/handoff"))
        assert found["kv_events"] == {"port": 5557, "replay_port": 5558, "topic": "kv"}
        costs = {"seconds_per_token": 1e-4, "seconds_per_squared_token": 3e-10}
        assert found["load"] == {"queued_seconds": 2.5, **costs, "trusted": True} | {
            "delayed_requests": {"64": 2.0, "65536": 0.5},
            "wait_seconds": {"64": 0.5, "65536": 9.0},
        }


def held(link: FakeLink, submit: Submit) -> list[AnySchedulerReply]:
    """A prefill scheduler's replies to a request whose KV it holds."""
    usage, timing = Usage(len(submit.prompt) // 4, 1, 0), Timing(forward_s=0.01)
    return [
        Tokens(rid=submit.rid, tokens=(7,)),
        Held(rid=submit.rid, lease_s=30.0, usage=usage, timing=timing),
    ]


HOLD = {"prompt_token_ids": [1, 2, 3], "ticket": "t", "rid": "mine", "handoff": "hold"}


@in_loop
async def test_a_held_prefill_answers_before_its_end(tokenizer: Tokenizer) -> None:
    link = FakeLink(held)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/prefill", json=HOLD))
        assert (answer["ticket"], answer["lease_s"], answer["finish_reason"]) == ("t", 30.0, None)
        assert (answer["first_token"]["id"], answer["usage"]["prompt_tokens"]) == (7, 3)
        assert answer["timing_ms"]["total"] == 10.0
        again = await http.post("/v1/prefill", json={**HOLD, "ticket": "u"})
        assert (again.status_code, json_of(again)["error"]["param"]) == (409, "rid")
        link.say(finished("mine", "handoff"))
        await asyncio.sleep(0)  # it is on its way
        answer = json_of(await http.post("/v1/prefill", json={**HOLD, "stream": False}))
        assert answer["lease_s"] == 30.0, "a ticket that was fetched leaves its rid free"
    assert [submit.route for submit in link.of(Submit)] == [SendTo("t", hold=True)] * 2
    assert link.of(Abort) == [], "leaving the answered request takes nothing back"


@in_loop
async def test_delete_cancels_a_held_request(tokenizer: Tokenizer) -> None:
    link = FakeLink(held)
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        assert (await http.post("/v1/prefill", json=HOLD)).status_code == 200
        assert json_of(await http.delete("/v1/prefill/mine")) == {"cancelled": True}
        abort = await link.wait_for(Abort)
        assert (abort.rid, abort.error.status) == ("mine", 499)
        while (await http.delete("/v1/prefill/mine")).status_code == 200:  # until its end has come back
            await asyncio.sleep(0)


@in_loop
async def test_a_client_that_leaves_before_the_answer_holds_nothing(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/prefill", json=HOLD))
        await link.wait_for(Submit)
        asked.cancel()
        assert (await link.wait_for(Abort)).rid == "mine"


@in_loop
async def test_a_first_token_that_ends_the_request_is_not_held(tokenizer: Tokenizer) -> None:
    link = FakeLink(saying(tokenizer, "<eos>", reason="stop"))
    async with running(link, tokenizer, role="prefill") as service, client(service) as http:
        answer = json_of(await http.post("/v1/prefill", json=HOLD))
        assert (answer["finish_reason"], answer["lease_s"]) == ("stop", 0.0)
        refused = json_of(await http.post("/v1/prefill", json={**HOLD, "handoff": "later"}))["error"]
        assert '"hold", "none" or left out' in refused["message"]
        plain = json_of(await http.post("/v1/prefill", json={**HOLD, "handoff": None}))
        assert plain["lease_s"] is None
