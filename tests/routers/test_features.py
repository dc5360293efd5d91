"""The cases of served fields behind each router, beside the decode server's own answers: the matrix of docs/api.md."""

import json
from typing import Any

import httpx
import pytest

from headrace.server.api.request import schema
from tests.features import ROUTES, Body, Kind, cases
from tests.routers.fields import BEHIND_ROUTERS
from tests.routers.fleet import Router, Site
from tests.routers.test_texts import streamed

pytestmark = pytest.mark.routers
BASE = {"model": "tested", "max_tokens": 6, "temperature": 0, "seed": 1}
HANDOFF = ("kv_transfer_params", "bootstrap_room", "bootstrap_host", "bootstrap_port")  # what routers write themselves
LABELS = ("id", "system_fingerprint", "stop_reason", "token_id", "index")
TIMEOUT_S = 60


def outcome(url: str, path: str, body: Body) -> Any:
    """What the choices say, or the status of a refusal."""
    response = httpx.post(f"{url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)
    if response.status_code != 200:
        return response.status_code
    if body.get("stream"):
        return streamed(response)
    return json.dumps(said(response.json().get("choices")), sort_keys=True)


def said(value: Any) -> Any:
    """Without the ids of calls, and without what one router writes and another leaves out."""
    if isinstance(value, list):
        return [said(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: said(each) for name, each in value.items() if name not in LABELS and each is not None}


def verdict(router: Router, site: Site, kind: Kind, name: str) -> str:
    """done, or what the router makes of the field."""
    path, smallest = ROUTES[kind]
    case = cases(kind)[name]
    plain = BASE | {name: value for name, value in (smallest | case.beside).items() if value is not None}
    given = plain | {name: case.value}
    direct, routed = (outcome(url, path, given) for url in (site.decode.url, router.url))
    if routed == direct:
        return "done"
    if isinstance(routed, int):
        return f"refused with {routed}" if not isinstance(direct, int) else "done"
    return "dropped" if routed == outcome(router.url, path, plain) else "differs"


@pytest.mark.parametrize("kind", [schema.CompletionBody, schema.ChatBody], ids=lambda kind: kind.__name__)
def test_what_routers_make_of_fields(router: Router, site: Site, kind: Kind) -> None:
    router.wait_ready(BASE | {"prompt": "hello"})
    names = [name for name in cases(kind) if name not in HANDOFF]
    found = {name: verdict(router, site, kind, name) for name in names}
    others = {name: what for name, what in found.items() if what != "done"}
    assert others == BEHIND_ROUTERS.get((router.name, ROUTES[kind][0]), {})
    site.quiet()
