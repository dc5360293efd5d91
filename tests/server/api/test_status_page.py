"""GET /: small, self-contained, open to all and without data; GET /status needs an operator's key."""

import base64
import hashlib
import re
from importlib.resources import files

import httpx
import pytest

from headrace.server.api.operations.pages import PAGE
from headrace.server.app import create_bootstrap_app
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import FakeLink, client, in_loop, running

LIMIT = 60 * 1000
TEXT = (files("headrace.server") / PAGE).read_text(encoding="utf-8")
HTML_SINKS = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "eval(", "Function(")
ELSEWHERE = r"https?:|//[a-z]|url\(|@import|<iframe|<img|<link(?! rel=\"icon\" href=\"data:,\")"
STORES = ("localStorage", "sessionStorage", "document.cookie", "indexedDB")


def test_the_page_is_small_and_names_no_other_host() -> None:
    assert len(TEXT.encode()) < LIMIT
    assert not re.search(ELSEWHERE, TEXT)


def test_texts_of_clients_become_text_nodes_only() -> None:
    assert not [sink for sink in HTML_SINKS if sink in TEXT]
    assert not re.search(r"<[^>]* (on[a-z]+|style)=", TEXT), "inline handlers and styles, which the policy forbids"


def test_the_key_is_kept_in_memory_alone() -> None:
    assert not [store for store in STORES if store in TEXT]


@in_loop
async def test_the_policy_allows_the_pages_own_script_and_style_alone(tokenizer: Tokenizer) -> None:
    async with running(FakeLink(), tokenizer) as service, client(service) as http:
        page = await http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (found,) = re.findall(rf"<{kind}>(.*?)</{kind}>", page.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert page.headers["x-content-type-options"] == "nosniff"


@in_loop
async def test_the_page_is_open_and_its_data_needs_a_key(tokenizer: Tokenizer) -> None:
    keys = {"api_keys": ("k",), "tenant_keys": ("anna=a",)}
    async with running(FakeLink(), tokenizer, **keys) as service, client(service) as http:
        page = await http.get("/")
        answers = {
            key: (await http.get("/status", headers={"Authorization": f"Bearer {key}"} if key else {}))
            for key in ("", "wrong", "a", "k")
        }
        service.recent.note("stages", "x", "a secret of the operator", 0.0, level="error")
        assert (await http.get("/")).text == page.text, "no data"
    assert page.status_code == 200
    assert {key: answer.status_code for key, answer in answers.items()} == {"": 401, "wrong": 401, "a": 403, "k": 200}
    assert answers["a"].json()["error"]["code"] == "for_operators"


@in_loop
async def test_a_server_that_is_loading_shows_why(tokenizer: Tokenizer) -> None:
    link = FakeLink()
    link.state = None
    async with running(link, tokenizer) as service, client(service) as http:
        status = (await http.get("/status")).json()
    assert (status["ready"], status["reason"]) == (False, "the server is loading")


@pytest.mark.parametrize("path", ["/", "/status", "/docs", "/openapi.json"])
@in_loop
async def test_the_bootstrap_port_has_neither(tokenizer: Tokenizer, path: str) -> None:
    async with running(FakeLink(), tokenizer, role="prefill") as service:
        bootstrap = httpx.ASGITransport(create_bootstrap_app(service))
        async with httpx.AsyncClient(transport=bootstrap, base_url="http://x") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get(path)).status_code == 404
