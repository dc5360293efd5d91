"""The cases of served fields behind each router, beside the decode server's own answers: the matrix of docs/api.md."""

import json
import secrets
import time
from typing import Any

import httpx
import pytest

from headrace.server.api.request import schema
from tests.e2e.harness import wait_until
from tests.features import ROUTES, Body, Kind, cases
from tests.routers.fields import BEHIND_ROUTERS
from tests.routers.fleet import Router, Site
from tests.routers.test_texts import streamed

pytestmark = pytest.mark.routers
BASE = {"model": "tested", "max_tokens": 6, "temperature": 0, "seed": 1}
HANDOFF = ("kv_transfer_params", "bootstrap_room", "bootstrap_host", "bootstrap_port")  # what routers write themselves
SESSIONS = ("session_id", "prompt_cache_key")  # whose KV is retained from the second turn on, after a pause
KEEPING = ("kv_hints", "prompt_cache_retention", *SESSIONS)  # they change no answer
PAUSE_S = 3.0  # KV of a session is retained for twice as long
LABELS = ("id", "system_fingerprint", "stop_reason", "token_id", "index")
TIMEOUT_S = 60


def outcome(site: Site, url: str, path: str, body: Body) -> Any:
    """What the choices say, or the status of a refusal."""
    response = httpx.post(f"{url}{path}", json=body, timeout=TIMEOUT_S, trust_env=False)
    if response.status_code != 200:
        return response.status_code
    if body.get("stream"):
        return streamed(response)
    answer = response.json()
    if answer["object"] == "open_prompt":  # a tenant may have a few of them
        site.decode.request("DELETE", f"/v1/prefill/{answer['id']}").raise_for_status()
    return json.dumps(said(answer.get("choices")), sort_keys=True)


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
    direct, routed = (outcome(site, url, path, given) for url in (site.decode.url, router.url))
    if routed == direct:
        return "done"
    if isinstance(routed, int):
        return f"refused with {routed}" if not isinstance(direct, int) else "done"
    return "dropped" if routed == outcome(site, router.url, path, plain) else "differs"


def retaining(site: Site) -> list[bool]:
    """Whether the servers retain KV."""
    return [server.metrics()["headrace_retained_pages"] > 0 for server in (site.prefill, site.decode)]


def keeping(router: Router, site: Site, kind: Kind, name: str) -> str:
    """What comes to the servers of a field that has them retain KV."""
    path, smallest = ROUTES[kind]
    text = secrets.token_hex(50)  # ends in the middle of a page, which no generated token fills
    prompt = {"prompt": text} if "prompt" in smallest else {"messages": [{"role": "user", "content": text}]}
    value = text if name in SESSIONS else cases(kind)[name].value  # a session that no other case has begun
    assert retaining(site) == [False, False]
    for pause_s in (PAUSE_S, 0.0) if name in SESSIONS else (0.0,):
        answer = httpx.post(
            f"{router.url}{path}",
            json=BASE | prompt | {"max_tokens": 2, name: value},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        if answer.status_code != 200:
            return f"refused with {answer.status_code}"
        site.quiet()  # the prefill server, too, has ended it: that may be after the answer
        time.sleep(pause_s)
    found = retaining(site)
    over = {"action_id": "over", "action_type": "release", "action_version": "1", "payload": {}}
    released = {"kv_hints": {"protocol_version": "1", "message_id": "m", "actions": [over]}, **prompt}
    for server in (site.prefill, site.decode):
        server.post("/v1/kv_hints", released)
        wait_until(lambda s=server: s.metrics()["headrace_retained_pages"] == 0, 10, "nothing is retained")
    return {(True, True): "done", (False, False): "dropped"}.get(tuple(found), "differs")  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", [schema.CompletionBody, schema.ChatBody], ids=lambda kind: kind.__name__)
def test_what_routers_make_of_fields(router: Router, site: Site, kind: Kind) -> None:
    router.wait_ready(BASE | {"prompt": "hello"})
    names = [name for name in cases(kind) if name not in HANDOFF]
    found = {name: (keeping if name in KEEPING else verdict)(router, site, kind, name) for name in names}
    others = {name: what for name, what in found.items() if what != "done"}
    assert others == BEHIND_ROUTERS.get((router.name, ROUTES[kind][0]), {})
    site.quiet()
