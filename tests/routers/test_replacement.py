"""Every server behind a router is replaced under load: no request fails."""

import signal
from contextlib import closing

import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.models import NAME
from tests.e2e.rolling import GRACE_S, Always, Clients, fleet
from tests.routers.fleet import BIN, Router

pytestmark = pytest.mark.routers

HEALTH = (
    "--health-check-endpoint", "/ready", "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
    "--health-success-threshold", "1",
)  # fmt: skip
GRACE = ("--drain-grace", f"{GRACE_S:g}")


def test_all_servers_behind_vllm_router_are_replaced() -> None:
    """Two prefill servers and two decode servers. The router learns from /ready that a server drains; what comes until
    then is served in the grace of the drain."""
    port = free_port()
    with fleet(flags=GRACE) as servers:
        addresses = [flag for server in servers.prefills for flag in ("--prefill", server.url)]
        addresses += [flag for server in servers.decodes for flag in ("--decode", server.url)]
        place = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
        command = (*place, *HEALTH, "--vllm-pd-disaggregation", *addresses)
        router = Router("vllm-nixl", BIN / "vllm-router", *command, port=port)
        with closing(router):
            try:
                router.wait_ready({"model": NAME, "prompt": "ready", "max_tokens": 1, "temperature": 0})
                with closing(Clients(Always(router.url), servers.texts)) as clients:
                    for server in servers.servers:
                        clients.more(20)
                        servers.replace(server)
                    clients.more(20)
                servers.empty()
                for server in servers.servers:
                    assert server.end(signal.SIGTERM) == 0
            finally:
                print(router.log)
