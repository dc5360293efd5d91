"""What routers' prefill requests are answered with, and what they cause on both sides."""

import asyncio
from typing import Any

import httpx
import pytest

from headrace.core.types.packed import pack, prompt_hash
from headrace.gateway.vllm import routes
from headrace.peer.commands import AnyResult, LoadKv, ReleaseLoad
from headrace.server.api.request.terms import session_digest
from tests.gateway.site import failing, gateway_site
from tests.server.fakes import in_loop

IDS = [3, 1, 4, 1, 5]
CHAT = "/v1/chat/completions"
RETAIN = {"action_id": "a1", "action_type": "retain", "action_version": "1", "payload": {"seconds": 60}}
HINTS = {"protocol_version": "1", "message_id": "m1", "actions": [RETAIN]}
MESSAGES = [{"role": "user", "content": "hi"}]


@in_loop
async def test_ids_are_computed_loaded_and_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        answer = (await site.post(prompt=IDS, model="smollm2", max_tokens=1, cache_salt="x" * 300, priority=2)).json()
        [load], [prompt] = site.peer.loads(), await site.posted(1)
        assert answer["kv_transfer_params"] == {"do_remote_prefill": True, "remote_num_tokens": 5}
        assert [choice["text"] for choice in answer["choices"]] == [""]
        assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("text_completion", 5)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert site.exporter.offers == [(load.id, 1, 5, 1)]
        assert (load.ticket.name, load.tokens, load.start) == (prompt["ticket"], 5, 0)
        assert load.prompt_hash == prompt_hash(pack(IDS))
        assert (prompt["prompt_token_ids"], prompt["max_tokens"], prompt["ignore_eos"]) == (IDS, 2, True)
        assert (prompt["temperature"], prompt["priority"], len(prompt["cache_salt"])) == (0, 2, 64)
        assert not [path for path, _ in site.decode.posts], "nothing is asked of the decode engine"
        assert await site.count("gateway_handoffs_total") == 1
        assert await site.count('kv_pages{state="leased"}') == 1
        site.gateway._parts.handoffs.released(load.id)  # type: ignore[union-attr]
        assert await site.count('kv_pages{state="leased"}') == 0


@pytest.mark.parametrize("known", [True, False])
@in_loop
async def test_what_is_said_of_a_conversations_kv_comes_to_servers_that_know_it(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    async with gateway_site(monkeypatch, handoff={"kv_hints": True, "session_id": True} if known else {}) as site:
        await site.post(prompt=IDS, session_id="s1", prompt_cache_key="another", kv_hints=HINTS)
        await site.post(prompt=IDS, prompt_cache_key="s1")
        first, second = await site.posted(2)
        assert [prompt.get("kv_hints") for prompt in (first, second)] == [HINTS if known else None, None]
        name = session_digest("s1") if known else None
        assert [prompt.get("session_id") for prompt in (first, second)] == [name, name]


@in_loop
async def test_texts_and_chats_become_ids_at_the_decode_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        text = (await site.post(prompt=["hello", "hello"], n=2)).json()
        assert "prompt_token_ids" not in text["kv_transfer_params"]
        assert len(text["choices"]) == 4
        chat = (await site.post(CHAT, messages=MESSAGES, tools=[], reasoning_effort="low", user=None)).json()
        assert chat["kv_transfer_params"]["prompt_token_ids"] == [5, 6, 7]
        assert chat["choices"][0]["message"] == {"role": "assistant", "content": ""}
        assert site.decode.posts == [
            ("/tokenize", {"model": None, "prompt": "hello"}),
            (
                "/tokenize",
                {
                    "messages": MESSAGES,
                    "tools": [],
                    "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True},
                },
            ),
        ]
        assert [jobs for _, _, _, jobs in site.exporter.offers] == [4, 1]
        assert len(await site.posted(2)) == 2, "equal prompts are computed once"


LEFT: list[tuple[str, str, dict[str, Any]]] = [
    ("different_prompts", "", {"prompt": ["a", "b"]}),
    ("different_prompts", "", {"prompt": [IDS, [1]]}),
    ("adapter", "", {"prompt": IDS, "model": "lora"}),
    ("beam_search", "", {"prompt": IDS, "use_beam_search": True}),
    ("echo", "", {"prompt": IDS, "echo": True}),
    ("echo", CHAT, {"messages": MESSAGES, "echo": True}),
    ("prompt_logprobs", "", {"prompt": IDS, "prompt_logprobs": 0}),
    ("suffix", "", {"prompt": "a", "suffix": "b"}),
    ("truncation", CHAT, {"messages": MESSAGES, "truncate_prompt_tokens": 2}),
    ("media", "", {"prompt_embeds": "AAAA"}),
    ("media", CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("pool_too_small", "", {"prompt": [1] * 513}),
]


@in_loop
async def test_what_cannot_be_handed_over_is_left_to_the_decode_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        models = site.decode.answers["/v1/models"][1]["data"]
        models.append({"id": "lora", "root": "/lora", "parent": "smollm2", "max_model_len": None})
        for reason, path, body in LEFT:
            before = await site.count(f'gateway_recomputed_total{{reason="{reason}"}}')
            answer = await site.post(path or "/v1/completions", **body)
            assert answer.status_code == 200, reason
            assert "kv_transfer_params" not in answer.json(), reason
            assert await site.count(f'gateway_recomputed_total{{reason="{reason}"}}') == before + 1
        assert (site.prompts(), site.exporter.offers) == ([], [])


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": IDS, "kv_transfer_params": None}, 404, "a gateway decodes nothing: send requests to a router"),
    ({"prompt": IDS, "kv_transfer_params": {"do_remote_prefill": True}}, 400, "asks a decode engine"),
    ({"prompt": IDS, "model": "other"}, 404, "the model 'other' is not served here; this gateway serves smollm2"),
    ({"prompt": []}, 400, "prompt is required"),
    ({}, 400, "prompt is required"),
    ({"prompt": [[]]}, 400, "prompt is empty"),
    ({"prompt": ["a", 1]}, 400, "have to be all texts"),
    ({"prompt": {}}, 400, "prompt: expected a string or a list"),
    ({"prompt": IDS, "n": 0}, 400, "n is 0; it has to be from 1 to 1024"),
    ({"prompt": [1] * 4097}, 400, "the prompt has 4097 tokens and the decode engines take 4096 in all"),
]


@in_loop
async def test_wrong_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        for body, status, words in WRONG:
            answer = await site.post(**body)
            assert answer.status_code == status, body
            assert words in answer.json()["error"]["message"]
        for path in ("/v1/responses", "/v1/score", "/rerank"):
            answer = await site.http.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "wrong_role")
        assert site.prompts() == []


@in_loop
async def test_refusals_of_the_decode_engine_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        site.decode.answers["/tokenize"] = (400, {"error": {"message": "no such template", "param": "chat_template"}})
        answer = await site.post(CHAT, messages=MESSAGES)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template")
        for status, words in ((500, "answers 500 to POST /tokenize"), (401, "wants another key (--decode-api-key)")):
            site.decode.answers["/tokenize"] = (status, {})
            answer = await site.post(CHAT, messages=MESSAGES)
            assert answer.status_code == 502
            assert words in answer.json()["error"]["message"]
        site.decode.answers["/tokenize"] = (200, {"ids": []})
        assert "sent an unexpected answer" in (await site.post(CHAT, messages=MESSAGES)).text


@in_loop
async def test_a_prompt_that_a_server_refuses_goes_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, servers=2) as site:
        while not all(server.up for server in site.gateway._parts.prefills.servers()):  # type: ignore[union-attr]
            await asyncio.sleep(0.01)
        succeeds = site.peer.script

        def script(load: LoadKv) -> AnyResult | None:
            if not site.prompts():
                return failing("queue_full")(load)
            for server in site.prefills:  # that is before the second one is asked
                server.answers["/v1/prefill"] = (200, {})
            return succeeds(load)

        site.peer.script = script
        for server in site.prefills:
            server.answers["/v1/prefill"] = (429, {"error": {"code": "queue_full", "message": "full"}})
        answer = await site.post(prompt=IDS)
        assert answer.status_code == 200
        await site.posted(2)
        assert [len(server.posts) for server in site.prefills] == [1, 1]
        assert answer.json()["kv_transfer_params"]["remote_num_tokens"] == 5
        assert await site.count('prefill_retries_total{reason="overloaded"}') == 1


@pytest.mark.parametrize("fallback", ["error", "recompute"])
@in_loop
async def test_failures_of_the_prefill_side(fallback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch, fallback=fallback) as site:
        site.peer.script = failing("peer_gone", "the prefill server is gone")
        site.prefills[0].answers["/v1/prefill"] = (503, {"error": {"code": "draining", "message": "it drains"}})
        answer = await site.post(prompt=IDS)
        if fallback == "error":
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining"), "its own answer"
        else:
            assert (answer.status_code, "kv_transfer_params" in answer.json()) == (200, False)
            assert await site.count('gateway_recomputed_total{reason="prefill_failed"}') == 1
        site.prefills[0].answers["/v1/prefill"] = (400, {"error": {"code": "invalid_token", "message": "no token"}})
        assert (await site.post(prompt=IDS)).status_code == 400, "the request's own fault, in both cases"
        site.prefills[0].answers["/v1/prefill"] = (200, {})  # either may come first, and a 400 is passed on
        site.peer.script = failing("no_kv")
        assert (await site.post(prompt=IDS)).status_code == 200
        assert await site.count('gateway_recomputed_total{reason="no_kv"}') == 1
        assert await site.count('kv_pages{state="leased"}') == 0


@in_loop
async def test_a_client_that_leaves_takes_its_prompt_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:
        site.peer.script = lambda load: None
        with pytest.raises(httpx.ReadTimeout):
            await site.http.post(
                "/v1/completions", json={"prompt": IDS, "kv_transfer_params": {"do_remote_decode": True}}, timeout=0.3
            )
        [load] = site.peer.loads()
        await _until(lambda: site.peer.cancelled() == [load.id])
        assert ReleaseLoad(id=load.id) in site.peer.commands, "it may have come in the same moment"
        assert await site.count('kv_pages{state="leased"}') == 0
        assert site.exporter.offers == []


@in_loop
async def test_an_answer_that_cannot_be_sent_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway_site(monkeypatch) as site:

        async def broken(*_: Any) -> None:
            raise OSError("the client is gone")

        monkeypatch.setattr(routes, "json_response", lambda _content: broken)
        assert (await site.post(prompt=IDS)).status_code == 500
        assert site.exporter.withdrawn == [site.peer.loads()[0].id]


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.01)


TOKENS = "/inference/v1/generate"


@pytest.mark.parametrize("place", ["body", "extra_args"])
@in_loop
async def test_token_ids_are_handed_over_as_llm_d_sends_them(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Its sidecar names the handoff in the body, its coordinator in sampling_params.extra_args."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    named: dict[str, Any] = {"sampling_params": {"max_tokens": 1, "n": 2}, "kv_transfer_params": params}
    if place == "extra_args":
        named = {"sampling_params": {"max_tokens": 1, "n": 2, "extra_args": {"kv_transfer_params": params}}}
    async with gateway_site(monkeypatch) as site:
        answer = (await site.http.post(TOKENS, json={"token_ids": IDS, "model": "smollm2", **named})).json()
        [prompt] = await site.posted(1)
        assert prompt["prompt_token_ids"] == IDS
        assert answer["kv_transfer_params"] == {"do_remote_prefill": True, "remote_num_tokens": 5}
        assert [choice["token_ids"] for choice in answer["choices"]] == [[], []]
        assert (answer["usage"]["prompt_tokens"], answer["output_mode"]) == (5, "tokens")
        assert [jobs for _, _, _, jobs in site.exporter.offers] == [2]
        media = await site.post(TOKENS, token_ids=IDS, features={"mm_hashes": {"image": ["a"]}})
        scored = await site.post(TOKENS, token_ids=IDS, sampling_params={"prompt_logprobs": 1})
        assert [each.json()["kv_transfer_params"] for each in (media, scored)] == [None, None]
        assert await site.count('gateway_recomputed_total{reason="media"}') == 1
        assert await site.count('gateway_recomputed_total{reason="prompt_logprobs"}') == 1
        without = await site.http.post(TOKENS, json={"token_ids": IDS})
        assert (without.status_code, without.json()["error"]["code"]) == (404, "wrong_role")
        empty = await site.post(TOKENS, token_ids=[])
        assert (empty.status_code, empty.json()["error"]["code"]) == (400, "empty_prompt")
