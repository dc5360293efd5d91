"""Which ids of a request routers pass on: X-Request-Id and traceparent, as the logs of both servers have them."""

import secrets
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Server, wait_until
from tests.routers.fields import PASSED_ON, REQUEST_ID, TRACE
from tests.routers.fleet import Router, Site

pytestmark = pytest.mark.routers
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "to be traced"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "to be traced"}]},
}


ASKED_ON = {"dynamo": "/generate"}
"""By name of a router that asks both servers on another route than it was asked on."""


def answered(server: Server, route: str) -> float:
    return server.metrics().get(f'headrace_http_requests_total{{route="{route}",status="200"}}', 0.0)


@pytest.mark.parametrize("route", BODIES)
def test_ids_come_to_both_servers_or_to_none(router: Router, site: Site, route: str) -> None:
    servers = (site.prefill, site.decode)
    asked = ASKED_ON.get(router.name, route)
    before = [answered(server, asked) for server in servers]
    name, trace = f"order-{secrets.token_hex(4)}", secrets.token_hex(16)
    headers = {REQUEST_ID: name, TRACE: f"00-{trace}-{secrets.token_hex(8)}-01"}
    body = {"model": site.model, "max_tokens": 4, "temperature": 0, **BODIES[route]}
    answer = httpx.post(f"{router.url}{route}", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    marks = {REQUEST_ID: f" id={name} ", TRACE: f" trace={trace} "}
    for server, count in zip(servers, before, strict=True):
        wait_until(lambda s=server, n=count: answered(s, asked) > n, 10, f"is answered\n{server.log}")
        for header in PASSED_ON[router.name]:
            wait_until(lambda s=server, h=header: marks[h] in s.log, 10, f"has the {header}\n{server.log}")
    found = [{header for header, mark in marks.items() if mark in server.log} for server in servers]
    assert found == [set(PASSED_ON[router.name])] * 2
