"""The routers of the README, by its own commands."""

import pytest

from headrace.server.launch.free_port import free_port
from tests.deployment.readme import ROUTERS, RUN_BY, with_ports
from tests.routers.fleet import BIN, Router, Site

pytestmark = pytest.mark.routers
COMMANDS = [command for command, test in RUN_BY.items() if test == ROUTERS]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_a_router_as_the_readme_starts_it(command: str, site: Site) -> None:
    """On other ports: its own, and that of its metrics, which have defaults."""
    ports = {"8000": site.prefill.port, "8001": site.decode.port, "8998": site.bootstrap_port}
    port = free_port()
    own = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    program, *arguments = with_ports(command, ports)
    router = Router(program, BIN / program, *arguments, *own, port=port)
    body = {"model": site.model, "prompt": "text, which every router takes", "max_tokens": 4, "temperature": 0}
    try:
        router.wait_ready(body)
        assert router.post("/v1/completions", body).json()["choices"][0]["finish_reason"] == "length"
    finally:
        router.close()
    site.quiet()
