"""What the key of a tenant may see and end: its own. Whom each route is for, whatever way its path is written in."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from headrace.core.messages.frontend import Abort, Submit
from headrace.core.types.requests.tenants import tenant_salt
from headrace.server.app import create_app, create_bootstrap_app
from headrace.server.frontend.service import Service
from headrace.text.tokenizer import Tokenizer
from tests.server.api.test_prefill import HOLD, held
from tests.server.fake_prefills import Prefills, decode, fetched
from tests.server.fakes import FakeLink, client, in_loop, json_of, running, saying

EVERYONE = {"/", "/docs", "/health", "/ready", "/metrics", "/query"}
OPERATORS = {"/status", "/debug/trace", "/debug/experts", "/debug/record", "/kv_event_sources", "/v1/returns"}
KEYS: dict[str, Any] = {"api_keys": ("boss",), "tenant_keys": ("anna=a", "bob=b")}
ANNA, BOB, BOSS, NOBODY = ({"Authorization": f"Bearer {key}"} for key in ("a", "b", "boss", "wrong"))
APPS: list[Callable[[Service], FastAPI]] = [create_app, create_bootstrap_app]


def calls(document: Any) -> list[tuple[str, str, Any]]:
    """Method, path and description of every operation."""
    return [(method, path, about) for path, found in document["paths"].items() for method, about in found.items()]


@pytest.mark.parametrize("make", APPS)
@pytest.mark.parametrize("role", ["prefill", "decode", "colocated"])
@in_loop
async def test_every_route_takes_the_keys_that_it_is_for(role: str, make: Any, tokenizer: Tokenizer) -> None:
    """A query that is wrong makes a recording end at once."""
    there, link = 0, FakeLink(saying(tokenizer, "x"))
    async with running(link, tokenizer, role=role, **KEYS) as service, client(service) as whole:
        document = json_of(await whole.get("/openapi.json", headers=ANNA))
        assert set(document["paths"]) >= EVERYONE | OPERATORS
        async with httpx.AsyncClient(transport=httpx.ASGITransport(make(service)), base_url="http://x") as http:
            for method, path, about in calls(document):
                where = path.replace("{rid}", "none").replace("{name:path}", "none") + "?seconds=wrong"
                answers = [(await http.request(method, where, headers=key)).status_code for key in (NOBODY, ANNA, BOSS)]
                if answers[2] == 404 and make is create_bootstrap_app:
                    continue  # it has few of them
                there += 1
                assert answers[2] not in (401, 403), path
                if path in EVERYONE:
                    assert answers == 3 * answers[2:], path
                else:
                    assert answers[:2] == [401, 403 if path in OPERATORS else answers[2]], path
                assert ("401" in about["responses"]) == (path not in EVERYONE), path
                assert ("403" in about["responses"]) == (path in OPERATORS), path
    assert there >= (20 if make is create_app else 4)


@pytest.mark.parametrize("path", sorted(OPERATORS))
@in_loop
async def test_no_way_of_writing_a_path_gets_around_it(path: str, tokenizer: Tokenizer) -> None:
    ways = [f"/{path}", f"{path}/", f"{path}%0a", f"/.{path}", f"{path}?x=1", path.upper(), f"{path}%00"]
    ways += [f"%2f{path[1:]}", path.replace("s", "%73"), f"{path};x", f"{path}#x", f"/v1/..{path}"]
    async with running(FakeLink(), tokenizer, **KEYS) as service, client(service) as http:
        for way in ways:
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                answer = await http.request(method, f"http://server/{way.removeprefix('/')}", headers=ANNA)
                assert answer.status_code in (307, 400, 401, 403, 404, 405), (way, method)


def open_request(_link: FakeLink, _submit: Submit) -> list[Any]:
    """It is never answered."""
    return []


@pytest.mark.parametrize("script", [open_request, held])
@in_loop
async def test_a_tenant_ends_its_own_requests_only(script: Any, tokenizer: Tokenizer) -> None:
    link = FakeLink(script)
    async with running(link, tokenizer, role="prefill", **KEYS) as service, client(service) as http:
        asked = asyncio.create_task(http.post("/v1/prefill", json=HOLD, headers=ANNA))
        await link.wait_for(Submit)
        if script is held:
            assert (await asked).status_code == 200
        refused = await http.delete("/v1/prefill/mine", headers=BOB)
        unknown = await http.delete("/v1/prefill/none", headers=BOB)
        assert refused.status_code == unknown.status_code == 404
        assert refused.text == unknown.text.replace("none", "mine"), "it does not tell that there is one"
        assert link.of(Abort) == []
        assert json_of(await http.delete("/v1/prefill/mine", headers=ANNA)) == {"cancelled": True}
        assert (await link.wait_for(Abort)).rid == "mine"
        await asked


@in_loop
async def test_an_operator_ends_the_requests_of_all(tokenizer: Tokenizer) -> None:
    link = FakeLink(held)
    async with running(link, tokenizer, role="prefill", **KEYS) as service, client(service) as http:
        assert (await http.post("/v1/prefill", json=HOLD, headers=ANNA)).status_code == 200
        assert (await http.delete("/v1/prefill/mine", headers=BOSS)).status_code == 200


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x", "y"], "cache_salt": "s"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "extra_key": "k"}),
    ("/v1/responses", {"input": "x"}),
    ("/generate", {"text": ["x", "y"], "cache_salt": ["s", "t"], "extra_key": "k"}),
    ("/v1/prefill", {"prompt": "x", "handoff": "none", "cache_salt": "s"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@in_loop
async def test_cached_prefixes_are_a_tenants_own(path: str, body: dict[str, Any], tokenizer: Tokenizer) -> None:
    async def salts(headers: dict[str, str], **config: Any) -> list[str]:
        link = FakeLink(saying(tokenizer, "hello"))
        async with running(link, tokenizer, **config) as service, client(service) as http:
            assert (await http.post(path, json=body, headers=headers)).status_code == 200
        return [submit.terms.cache_salt for submit in link.of(Submit)]

    alone = await salts({})
    assert await salts(BOSS, **KEYS) == alone, "without a tenant a salt is the client's"
    anna, bob = await salts(ANNA, **KEYS), await salts(BOB, **KEYS)
    assert anna == await salts(ANNA, **KEYS)
    assert len({*alone, *anna, *bob}) == 3 * len(set(alone))
    assert await salts(ANNA, share_prefixes=True, **KEYS) == alone


@in_loop
async def test_both_servers_of_a_handoff_have_the_same_salt(tokenizer: Tokenizer) -> None:
    """The prefill server gets it in the body, and its events of the prefix cache have it."""
    link, prefills = FakeLink(fetched(tokenizer)), Prefills()
    async with decode(link, tokenizer, prefills, **KEYS) as (_, http):
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=ANNA)).status_code == 200
    (submit,) = link.of(Submit)
    ((_, posted, _),) = prefills.posts
    assert submit.terms.cache_salt == posted["cache_salt"] == tenant_salt("anna", "")


def test_no_salt_of_one_tenant_is_that_of_another() -> None:
    names, salts = ("a", "b", "ab", "a.b"), ("", "a", "b", tenant_salt("a", ""), tenant_salt("b", "x"))
    assert len({tenant_salt(name, salt) for name in names for salt in salts}) == len(names) * len(salts)
    assert all(tenant_salt("", salt) == salt for salt in salts)
    assert max(len(tenant_salt(name, "x" * 10_000)) for name in names) == 64
