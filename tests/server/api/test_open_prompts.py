"""Open prompts over HTTP: opened, appended to, cut, committed, deleted, expired."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from headrace.core.messages.frontend import Abort, AddPrefill, Submit
from headrace.core.messages.replies import AnySchedulerReply, Progress, RequestFailed, Tokens
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.packed import unpack
from headrace.core.types.requests.kv_hints import Retain
from headrace.core.types.requests.request import Discard, FetchFrom, SendTo
from headrace.server.app import create_app
from headrace.server.frontend.open_prompts import early_kv
from headrace.text.tokenizer import Tokenizer
from tests.server.fake_prefills import ANSWER, ONE, Prefills, fetched, until_ready, welcoming
from tests.server.fakes import FakeLink, Script, client, finished, in_loop, json_of, reserving, running

TEXT = "hello world " * 12


def computing(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """A scheduler that computes pieces at once, and prompts that are handed over."""
    total = len(submit.prompt) // 4
    if submit.open:
        done = (total - 1) // 16 * 16
        yield Progress(rid=submit.rid, phase="computing", done=done, total=total)
        yield finished(submit.rid, "discarded", prompt=total)
    else:
        yield Tokens(rid=submit.rid, tokens=(7,))
        yield finished(submit.rid, "handed_over", prompt=total, cached=1)


def stalled(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """One that gets to no piece."""
    return () if submit.open else computing(link, submit)


async def opened(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await http.post("/v1/prefill", json={"open": True, **body})
    assert answer.status_code == 200, answer.text
    return json_of(answer)


async def settled(http: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """Its state once nothing is computed any more."""
    before = None
    while (now := json_of(await http.get(f"/v1/prefill/{name}"))["computed"]) != before:
        before = now
        await asyncio.sleep(0.02)
    return json_of(await http.get(f"/v1/prefill/{name}"))


def pieces(link: FakeLink) -> list[Submit]:
    return [submit for submit in link.of(Submit) if submit.open]


@in_loop
async def test_a_prompt_that_is_opened_appended_to_and_committed(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    whole = [7, 8, 9] * 30
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        state = await opened(http, prompt_token_ids=whole[:40], cache_salt="own", temperature=0)
        assert state["tokens"] == state["stable"] == 40
        assert state["ticket"]
        assert 290 < state["expires_s"] <= 300
        name = state["id"]
        assert (await settled(http, name))["computed"] == 32
        appended = json_of(await http.patch(f"/v1/prefill/{name}", json={"append": whole[40:80]}))
        assert appended["tokens"] == 80
        assert (await settled(http, name))["computed"] == 64
        await http.patch(f"/v1/prefill/{name}", json={"append": whole[80:]})
        answer = json_of(await http.post(f"/v1/prefill/{name}/commit", json={"temperature": 0.5, "seed": 3}))
        again = await http.post(f"/v1/prefill/{name}/commit", json={})
        metrics = (await http.get("/metrics")).text
    submit = link.of(Submit)[-1]
    assert answer["ticket"] == state["ticket"]
    assert answer["first_token"]["id"] == 7
    assert list(unpack(submit.prompt)) == whole
    assert submit.route == SendTo(state["ticket"])
    assert (submit.sampling.temperature, submit.sampling.seed, submit.open) == (0.5, 3, False)
    assert all(piece.route == Discard() for piece in pieces(link))
    assert all(piece.terms.retain == Retain.of_open_prompt(300.0) for piece in pieces(link))
    assert submit.terms.retain is None
    assert {piece.terms.cache_salt for piece in pieces(link)} == {submit.terms.cache_salt} != {""}
    assert all(unpack(piece.prompt) == unpack(submit.prompt)[: len(piece.prompt) // 4] for piece in pieces(link))
    assert again.status_code == 409
    assert json_of(again)["error"]["code"] == "already_committed"
    assert 'headrace_open_prompts_total{end="committed"} 1' in metrics
    assert "headrace_open_prompts 0" in metrics


@in_loop
async def test_what_is_appended_while_a_piece_is_computed_is_the_next_one(tokenizer: Tokenizer) -> None:
    link = FakeLink(stalled)
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 40))["id"]
        first = await link.wait_for(Submit)
        for _ in range(5):
            await http.patch(f"/v1/prefill/{name}", json={"append": [2] * 20})
        link.say(finished(first.rid, "discarded", prompt=40))
        await link.wait_for(Submit, 2)
        assert [len(piece.prompt) // 4 for piece in pieces(link)] == [40, 140]
        metrics = (await http.get("/metrics")).text
    assert "headrace_open_requests 0" in metrics, "pieces are no requests of clients"
    assert "headrace_open_pieces_total 2" in metrics


@in_loop
async def test_a_commit_finishes_the_piece_under_way_first(tokenizer: Tokenizer) -> None:
    link = FakeLink(stalled)
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 40))["id"]
        await link.wait_for(Submit)
        answer = await http.post(f"/v1/prefill/{name}/commit", json={"handoff": "none"})
    sent = [message for message in link.sent if isinstance(message, Submit | Abort)]
    assert answer.status_code == 200
    assert [type(message) for message in sent] == [Submit, Abort, Submit]
    assert sent[1].finish


@in_loop
async def test_a_text_is_committed_as_if_it_had_come_whole(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    text = TEXT + "wörld 🙂\r\n 12345"
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt=text[:9]))["id"]
        for start in range(9, len(text), 7):
            await http.patch(f"/v1/prefill/{name}", json={"append": text[start : start + 7]})
        state = await settled(http, name)
        assert 0 < state["computed"] <= state["stable"] < state["tokens"]
        await http.post(f"/v1/prefill/{name}/commit", json={})
    assert list(unpack(link.of(Submit)[-1].prompt)) == tokenizer.encode(text)


@in_loop
async def test_messages_are_committed_as_if_they_had_come_whole(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    said = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {TEXT}"} for n in range(5)]
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, messages=said[:1]))["id"]
        await http.patch(f"/v1/prefill/{name}", json={"append": said[1:2]})
        await http.patch(f"/v1/prefill/{name}", json={"append": [{"role": "user", "content": "an error"}]})
        cut = json_of(await http.post(f"/v1/prefill/{name}/truncate", json={"messages": 2}))
        assert cut["tokens"] == len(tokenizer.encode_chat(said[:2]))
        await http.patch(f"/v1/prefill/{name}", json={"append": said[2:]})
        assert (await settled(http, name))["computed"] > 0
        await http.post(f"/v1/prefill/{name}/commit", json={})
    assert list(unpack(link.of(Submit)[-1].prompt)) == tokenizer.encode_chat(said)


@in_loop
async def test_a_prompt_that_is_cut_goes_on_from_there(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 100))["id"]
        assert (await settled(http, name))["computed"] == 96
        cut = json_of(await http.post(f"/v1/prefill/{name}/truncate", json={"tokens": 40}))
        assert (cut["tokens"], cut["computed"]) == (40, 32)
        await http.patch(f"/v1/prefill/{name}", json={"append": [2] * 60})
        assert (await settled(http, name))["computed"] == 96
        await http.post(f"/v1/prefill/{name}/commit", json={})
        text = json_of(await http.post("/v1/prefill", json={"open": True, "prompt": TEXT}))
        half = text["tokens"] // 2
        cut = json_of(await http.post(f"/v1/prefill/{text['id']}/truncate", json={"tokens": half}))
        assert cut["tokens"] == half
    assert list(unpack([each for each in link.of(Submit) if not each.open][-1].prompt)) == [1] * 40 + [2] * 60


@in_loop
async def test_wrong_uses_are_refused_and_change_nothing(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 20))["id"]
        path = f"/v1/prefill/{name}"
        for method, at, body, status, field in (
            ("PATCH", path, {"append": "text"}, 400, "append"),
            ("PATCH", path, {"append": [{"role": "user", "content": "x"}]}, 400, "append"),
            ("PATCH", path, {"append": [10**6]}, 400, "prompt_token_ids[20]"),
            ("PATCH", path, {"append": [1] * 100_000}, 400, "prompt_token_ids"),
            ("PATCH", path, {"more": [1]}, 400, "more"),
            ("PATCH", "/v1/prefill/open-x", {"append": [1]}, 404, "id"),
            ("GET", "/v1/prefill/open-x", None, 404, "id"),
            ("POST", "/v1/prefill/open-x/commit", {}, 404, "id"),
            ("POST", f"{path}/truncate", {}, 400, "tokens"),
            ("POST", f"{path}/truncate", {"tokens": 21}, 400, "tokens"),
            ("POST", f"{path}/truncate", {"tokens": 0}, 400, "tokens"),
            ("POST", f"{path}/truncate", {"messages": 1}, 400, "messages"),
            ("POST", f"{path}/commit", {"temperature": -1}, 400, "temperature"),
            ("POST", f"{path}/commit", {"prompt": "x"}, 400, "prompt"),
            ("POST", "/v1/prefill", {"open": True}, 400, "prompt"),
            ("POST", "/v1/prefill", {"open": True, "prompt_token_ids": [1], "images": ["x"]}, 400, "images"),
        ):
            answer = await http.request(method, at, json=body)
            error = json_of(answer)["error"]
            assert (answer.status_code, error["param"]) == (status, field), (method, at, body, error)
        assert json_of(await http.get(path))["tokens"] == 20


@in_loop
async def test_prompts_of_a_tenant_are_bounded_and_its_own(tokenizer: Tokenizer) -> None:
    link = FakeLink(computing)
    keys = ("alice=ka", "bob=kb")
    alice, bob = ({"Authorization": f"Bearer {key}"} for key in ("ka", "kb"))
    body = {"open": True, "prompt_token_ids": [1] * 20}
    async with (
        running(link, tokenizer, role="prefill", length=400, tenant_keys=keys, open_prompts=2) as service,
        client(service) as http,
    ):
        first = json_of(await http.post("/v1/prefill", json=body, headers=alice))
        await http.post("/v1/prefill", json=body, headers=alice)
        third = await http.post("/v1/prefill", json=body, headers=alice)
        assert (third.status_code, json_of(third)["error"]["code"]) == (429, "queue_full")
        assert (await http.post("/v1/prefill", json=body, headers=bob)).status_code == 200
        path = f"/v1/prefill/{first['id']}"
        assert (await http.get(path, headers=bob)).status_code == 404
        assert (await http.delete(path, headers=bob)).status_code == 404
        assert (await http.delete(path, headers=alice)).status_code == 200
        assert (await http.get(path, headers=alice)).status_code == 404
        assert (await http.post("/v1/prefill", json=body, headers=alice)).status_code == 200


@in_loop
async def test_a_prompt_whose_client_vanishes_expires(tokenizer: Tokenizer) -> None:
    link = FakeLink(stalled)
    async with running(link, tokenizer, role="prefill", length=400, open_s=0.2) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 40))["id"]
        abort = await link.wait_for(Abort)
        assert (abort.rid, abort.finish) == (pieces(link)[0].rid, True)
        assert (await http.get(f"/v1/prefill/{name}")).status_code == 404
        metrics = (await http.get("/metrics")).text
        assert 'headrace_open_prompts_total{end="expired"} 1' in metrics
        assert "headrace_open_prompt_tokens 0" in metrics


@in_loop
async def test_a_commit_that_is_refused_for_now_leaves_the_prompt_open(tokenizer: Tokenizer) -> None:
    full = refusals.QUEUED_REQUESTS.error(predicted_s=1.0, queued=1, own=1, limit=1)

    def refusing(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        return computing(link, submit) if submit.open else (RequestFailed(rid=submit.rid, error=full),)

    link = FakeLink(refusing)
    async with running(link, tokenizer, role="prefill", length=400) as service, client(service) as http:
        name = (await opened(http, prompt_token_ids=[1] * 40))["id"]
        assert (await http.post(f"/v1/prefill/{name}/commit", json={})).status_code == 429
        link.script = computing
        assert (await http.post(f"/v1/prefill/{name}/commit", json={"stream": True})).text.count("event: done") == 1


@pytest.mark.parametrize("flags", [{"open_prompts": 0}])
def test_none_are_taken_where_none_may_be_open(tokenizer: Tokenizer, flags: dict[str, Any]) -> None:
    @in_loop
    async def run() -> None:
        async with (
            running(FakeLink(computing), tokenizer, role="prefill", length=400, **flags) as service,
            client(service) as http,
        ):
            answer = await http.post("/v1/prefill", json={"open": True, "prompt": "x"})
            assert (answer.status_code, json_of(answer)["error"]["param"]) == (400, "open")

    run()


def decoding(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
    """A colocated scheduler."""
    return (
        computing(link, submit)
        if submit.open
        else (Tokens(rid=submit.rid, tokens=(7,)), finished(submit.rid, "length"))
    )


@in_loop
async def test_a_chat_is_opened_appended_to_and_continued(tokenizer: Tokenizer) -> None:
    link = FakeLink(decoding)
    said = [{"role": ("user", "assistant")[n % 2], "content": f"{n} {TEXT}"} for n in range(3)]
    path = "/v1/chat/completions"
    async with running(link, tokenizer, length=400) as service, client(service) as http:
        opened = json_of(await http.post(path, json={"messages": said[:1], "seed": 3, "headrace": {"open": True}}))
        assert (opened["object"], opened["choices"]) == ("open_prompt", [])
        more = {"open": True, "open_id": opened["id"]}
        grown = json_of(await http.post(path, json={"messages": said[1:2], "headrace": more}))
        assert grown["id"] == opened["id"]
        assert grown["headrace"]["tokens"] == len(tokenizer.encode_chat(said[:2]))
        assert (await settled(http, opened["id"]))["computed"] > 0
        last = {"messages": said[2:], "headrace": {"open_id": opened["id"]}, "max_tokens": 1, "stream": True}
        answer = await http.post(path, json=last)
        again = await http.post(path, json=last)
    submit = link.of(Submit)[-1]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert list(unpack(submit.prompt)) == tokenizer.encode_chat(said)
    assert (submit.sampling.seed, submit.open) == (3, False)
    assert again.status_code == 409


@in_loop
async def test_a_completion_is_opened_appended_to_and_continued(tokenizer: Tokenizer) -> None:
    link = FakeLink(decoding)
    path = "/v1/completions"
    async with running(link, tokenizer, length=400) as service, client(service) as http:
        name = json_of(await http.post(path, json={"prompt": TEXT, "headrace": {"open": True}}))["id"]
        for body, status, field in (
            ({"prompt": "x", "headrace": {}}, 400, "headrace"),
            ({"prompt": "x", "headrace": {"open_id": "open-x"}}, 404, "id"),
            ({"prompt": "x", "headrace": {"open": True}, "stream": True}, 400, "stream"),
            ({"prompt": ["x", "y"], "headrace": {"open": True}}, 400, "prompt"),
            ({"prompt": [1], "headrace": {"open_id": name}}, 400, "prompt"),
            ({"prompt": "x", "headrace": {"open_id": name}, "temperature": 9}, 400, "temperature"),
        ):
            answer = await http.post(path, json=body)
            assert (answer.status_code, json_of(answer)["error"]["param"]) == (status, field), body
        elsewhere = await http.post(f"/v1/prefill/{name}/commit", json={"handoff": "none"})
        assert json_of(elsewhere)["error"]["code"] == "wrong_route"
        answer = json_of(await http.post(path, json={"prompt": "end", "headrace": {"open_id": name}, "max_tokens": 1}))
    assert answer["object"] == "text_completion"
    assert list(unpack(link.of(Submit)[-1].prompt)) == tokenizer.encode(TEXT + "end")


def cached(submit: Submit) -> bool:
    return isinstance(submit.route, SendTo) and submit.route.cached


def is_prefix(submit: Submit) -> bool:
    return isinstance(submit.route, FetchFrom) and submit.route.prefix


@asynccontextmanager
async def decode_server(
    tokenizer: Tokenizer, there: httpx.AsyncBaseTransport
) -> AsyncIterator[tuple[FakeLink, httpx.AsyncClient]]:
    """A decode server whose prefill server is at the other end of this transport. KV that is to come early is awaited:
    it has come when the test says so."""
    respond = fetched(tokenizer)
    link = FakeLink(lambda link, submit: reserving(link, submit) if is_prefix(submit) else respond(link, submit))
    async with (
        running(link, tokenizer, role="decode", length=400, prefill=(ONE,), prefill_transport=there) as service,
        client(service) as http,
    ):
        await link.wait_for(AddPrefill)
        welcoming(link, ONE)
        await until_ready(http)
        yield link, http


@in_loop
async def test_a_decode_server_has_pieces_computed_where_the_prompt_will_be(tokenizer: Tokenizer) -> None:
    """The prefill server has the same prompt open, until it is committed here."""
    there = FakeLink(computing)
    path = "/v1/completions"
    async with running(there, tokenizer, role="prefill", length=400) as service:
        transport = httpx.ASGITransport(app=create_app(service))
        async with decode_server(tokenizer, transport) as (link, http):
            name = json_of(await http.post(path, json={"prompt": [1] * 100, "headrace": {"open": True}}))["id"]
            await there.wait_for(Submit)
            more = {"prompt": [2] * 60, "headrace": {"open": True, "open_id": name}}
            await http.post(path, json=more)
            await there.wait_for(Submit, 2)
            await http.post(f"/v1/prefill/{name}/truncate", json={"tokens": 80})
            await http.post(path, json={"prompt": [3] * 60, "headrace": {"open": True, "open_id": name}})
            await there.wait_for(Submit, 3)
            last = {"prompt": [4] * 9, "headrace": {"open_id": name}, "max_tokens": 2}
            answer = await http.post(path, json=last)
            assert answer.status_code == 200, answer.text
            while service.open_prompts.samples()[0].value:
                await asyncio.sleep(0.01)
    pieces_there = [list(unpack(piece.prompt)) for piece in pieces(there)]
    assert pieces_there[0] == [1] * 100
    assert pieces_there[1] == [1] * 100 + [2] * 60
    assert pieces_there[-1] == [1] * 80 + [3] * 60
    assert not pieces(link)
    (here,) = [submit for submit in link.of(Submit) if not is_prefix(submit)]
    (posted,) = [submit for submit in there.of(Submit) if not submit.open and not cached(submit)]
    assert list(unpack(here.prompt)) == list(unpack(posted.prompt)) == [1] * 80 + [3] * 60 + [4] * 9
    assert {piece.terms.cache_salt for piece in pieces(there)} == {posted.terms.cache_salt}


@in_loop
async def test_a_prefill_server_that_takes_no_open_prompts_gets_the_prompt_when_it_is_committed(
    tokenizer: Tokenizer,
) -> None:
    asked: list[str] = []

    def answer(body: dict[str, Any]) -> httpx.Response:
        asked.append("open" if "open" in body else "prompt")
        return (
            httpx.Response(400, json={"error": {"message": "x"}})
            if "open" in body
            else httpx.Response(200, json=ANSWER)
        )

    path = "/v1/completions"
    async with decode_server(tokenizer, Prefills(answer)) as (_, http):
        name = json_of(await http.post(path, json={"prompt": [1] * 100, "headrace": {"open": True}}))["id"]
        for _ in range(3):
            await http.post(path, json={"prompt": [2] * 60, "headrace": {"open": True, "open_id": name}})
            await asyncio.sleep(0.02)
        assert (await http.get(f"/v1/prefill/{name}")).status_code == 200
        done = await http.post(path, json={"prompt": [4] * 9, "headrace": {"open_id": name}, "max_tokens": 2})
        assert done.status_code == 200, done.text
    assert asked == ["open", "prompt"]


class EarlyServers:
    """A decode server and its prefill server; how KV comes early between them is up to the test."""

    def __init__(self, link: FakeLink, there: FakeLink, http: httpx.AsyncClient) -> None:
        self.link = link
        self.there = there
        self.http = http

    async def grow(self, tokens: list[int], name: str | None = None) -> str:
        more = {"open": True} if name is None else {"open": True, "open_id": name}
        answer = await self.http.post("/v1/completions", json={"prompt": tokens, "headrace": more})
        assert answer.status_code == 200, answer.text
        return str(json_of(answer)["id"])

    async def commit(self, name: str) -> None:
        last = {"prompt": [4] * 9, "headrace": {"open_id": name}, "max_tokens": 2}
        answer = await self.http.post("/v1/completions", json=last)
        assert answer.status_code == 200, answer.text

    @property
    def asked(self) -> list[Submit]:
        """Prefixes that the decode server has begun to fetch."""
        return [submit for submit in self.link.of(Submit) if is_prefix(submit)]

    async def begun(self, count: int) -> Submit:
        """The count-th fetch, once the prefill server has been asked for it."""
        async with asyncio.timeout(10):
            while len([submit for submit in self.there.of(Submit) if cached(submit)]) < count:
                await asyncio.sleep(0.005)
        return self.asked[count - 1]

    async def come(self, count: int) -> list[int]:
        """Have it come; returns its tokens."""
        submit = await self.begun(count)
        self.link.say(finished(submit.rid, "fetched"))
        return list(unpack(submit.prompt))


def early(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[EarlyServers], Coroutine[Any, Any, None]],
    script: Script = computing,
    transport: Callable[[httpx.AsyncBaseTransport], httpx.AsyncBaseTransport] = lambda real: real,
) -> None:
    """Run a test with both servers, which look often."""
    monkeypatch.setattr(early_kv, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(early_kv, "LONGEST_PAUSE_S", 0.02)

    @in_loop
    async def run() -> None:
        there = FakeLink(script)
        async with running(there, tokenizer, role="prefill", length=400) as service:
            real = httpx.ASGITransport(app=create_app(service))
            async with decode_server(tokenizer, transport(real)) as (link, http):
                await test(EarlyServers(link, there, http))

    run()


def test_kv_of_an_open_prompt_comes_while_it_is_open(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages of what is computed and still part of the prompt, one fetch at a time."""

    async def test(servers: EarlyServers) -> None:
        name = await servers.grow([1] * 100)
        first = await servers.begun(1)
        assert first.terms.retain == Retain.of_open_prompt(300.0)
        await servers.grow([2] * 60, name)
        await asyncio.sleep(0.1)
        assert len(servers.asked) == 1
        assert await servers.come(1) == [1] * 96
        assert await servers.come(2) == [1] * 100 + [2] * 44
        await servers.http.post(f"/v1/prefill/{name}/truncate", json={"tokens": 80})
        await servers.grow([3] * 60, name)
        assert await servers.come(3) == [1] * 80 + [3] * 48
        await asyncio.sleep(0.1)
        assert json_of(await servers.http.get(f"/v1/prefill/{name}"))["computed"] == 128
        await servers.commit(name)
        assert len(servers.asked) == 3
        metrics = (await servers.http.get("/metrics")).text
        assert 'headrace_prefix_fetches_total{result="fetched",source="open"} 3' in metrics
        assert 'headrace_prefix_fetched_tokens_total{source="open"} 96' in metrics  # as the scripted scheduler says
        salts = {submit.terms.cache_salt for submit in servers.there.of(Submit)}
        assert len(salts | {submit.terms.cache_salt for submit in servers.link.of(Submit)}) == 1

    early(tokenizer, monkeypatch, test)


@pytest.mark.parametrize("how", ["commit", "delete"])
def test_a_fetch_under_way_ends_with_the_open_prompt(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async def test(servers: EarlyServers) -> None:
        name = await servers.grow([1] * 100)
        fetch = await servers.begun(1)
        if how == "commit":
            await servers.commit(name)
        else:
            await servers.http.delete(f"/v1/prefill/{name}")
        abort = await servers.link.wait_for(Abort)
        assert (abort.rid, abort.finish) == (fetch.rid, False)
        await servers.there.wait_for(Abort)
        assert len(servers.asked) == 1

    def waits(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        return () if cached(submit) else computing(link, submit)

    early(tokenizer, monkeypatch, test, waits)


def test_kv_that_does_not_come_early_is_tried_a_few_times(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evicted(link: FakeLink, submit: Submit) -> Iterable[AnySchedulerReply]:
        missing = ErrorInfo(code="not_cached", message="evicted", status=412)
        return (RequestFailed(rid=submit.rid, error=missing),) if cached(submit) else computing(link, submit)

    async def test(servers: EarlyServers) -> None:
        name = await servers.grow([1] * 100)
        await servers.begun(early_kv.TRIES)
        await asyncio.sleep(0.1)
        assert len(servers.asked) == early_kv.TRIES
        await servers.grow([2] * 60, name)
        await servers.begun(early_kv.TRIES + 1)
        await servers.commit(name)
        assert '{result="fetched",source="open"} 0' in (await servers.http.get("/metrics")).text

    early(tokenizer, monkeypatch, test, evicted)


def test_a_prefill_server_that_shares_no_prefixes_is_not_asked_for_any(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older(httpx.AsyncBaseTransport):
        """Its discovery says nothing of prefixes."""

        def __init__(self, real: httpx.AsyncBaseTransport) -> None:
            self.real = real

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            response = await self.real.handle_async_request(request)
            if request.url.path != "/v1/handoff":
                return response
            found = msgspec.json.decode(await response.aread())
            del found["prefixes"]
            return httpx.Response(200, json=found)

    async def test(servers: EarlyServers) -> None:
        name = await servers.grow([1] * 100)
        await servers.there.wait_for(Submit)
        await asyncio.sleep(0.1)
        await servers.commit(name)
        assert servers.asked == []

    early(tokenizer, monkeypatch, test, transport=Older)
