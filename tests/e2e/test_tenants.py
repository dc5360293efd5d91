"""Prefixes are shared within a tenant and with no other, on every route, at both servers of a pair, behind routers."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pair
from tests.e2e.test_names import MODEL, Pair, ok

PROMPT = "the same long story for everybody "
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT * 3, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT * 4}], "max_tokens": 4},
    "/v1/responses": {"input": PROMPT * 5, "max_output_tokens": 4},
    "/generate": {"text": PROMPT * 6, "sampling_params": {"max_new_tokens": 4}},
}
Tenants = list[dict[str, Any]]


def strangers() -> Tenants:
    """Fields of four tenants, each with a pair of its own; the first one has no extra_key, the second no salt."""
    one, other = secrets.token_hex(8), secrets.token_hex(8)
    return [
        {"cache_salt": one},
        {"extra_key": one},
        {"cache_salt": one, "extra_key": other},
        {"cache_salt": other, "extra_key": one},
    ]


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    port = free_port()
    with pair((*MODEL, "--bootstrap-port", str(port)), MODEL) as (prefill, decode):
        yield Pair(prefill, decode, port)


def cached(answer: Any) -> list[int]:
    """Cached prompt tokens, in any of the forms: of each prompt where the answer is a list, else of all together."""
    if isinstance(answer, list):
        return [one["meta_info"]["cached_tokens"] for one in answer]
    if "meta_info" in answer:
        return [answer["meta_info"]["cached_tokens"]]
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return [usage["cached_tokens"] if details is None else details["cached_tokens"]]


def check(ask: Callable[[dict[str, Any]], Any]) -> None:
    """ask: what a tenant's prompt is answered, given the tenant's fields."""
    tenants = strangers()
    for tenant in tenants:
        assert not any(cached(ask(tenant))), "another tenant's prefix"
    for tenant in tenants:
        assert all(cached(ask(tenant))), "its own"


@pytest.mark.parametrize("path", ROUTES)
def test_a_pair_by_itself(servers: Pair, path: str) -> None:
    check(lambda tenant: ok(servers.decode.post(path, {**ROUTES[path], **tenant})))


@pytest.mark.parametrize("path", ROUTES)
def test_a_router_that_asks_the_prefill_server_first(servers: Pair, path: str) -> None:
    def ask(tenant: dict[str, Any]) -> Any:
        body = {**ROUTES[path], **tenant}
        return ok(servers.decode.post(path, {**body, "kv_transfer_params": servers.first(path, body)}))

    check(ask)


@pytest.mark.parametrize("path", ROUTES)
def test_a_router_that_asks_both(servers: Pair, path: str) -> None:
    def ask(tenant: dict[str, Any]) -> Any:
        first, second = servers.both(path, {**ROUTES[path], **tenant, **servers.room()})
        answers: tuple[httpx.Response, ...] = (first.result(), second.result())
        found = [ok(answer) for answer in answers]
        assert any(cached(found[0])) == any(cached(found[1]))
        return found[1]

    check(ask)


@pytest.mark.parametrize("server", ["prefill", "decode"])
def test_native_requests(servers: Pair, server: str) -> None:
    asked: Server = getattr(servers, server)
    check(lambda tenant: ok(asked.post("/v1/prefill", {"prompt": PROMPT * 7, "handoff": "none", **tenant})))


def test_a_list_of_prompts_has_a_tenant_for_each(servers: Pair) -> None:
    def ask(first: str, second: str) -> list[int]:
        body = {"text": [PROMPT * 8, PROMPT * 9], "sampling_params": {"max_new_tokens": 2}}
        return cached(ok(servers.decode.post("/generate", {**body, "extra_key": [first, second]})))

    one, other = secrets.token_hex(8), secrets.token_hex(8)
    assert ask(one, other) == [0, 0]
    first, second = ask(one, secrets.token_hex(8))
    assert (first > 0, second) == (True, 0)
    first, second = ask(secrets.token_hex(8), other)
    assert (first, second > 0) == (0, True)
