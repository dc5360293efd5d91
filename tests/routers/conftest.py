"""One pair for the tests of texts, and routers in front of it."""

from collections.abc import Iterator

import pytest

from server.local import free_port
from tests.e2e.harness import pair
from tests.routers.fleet import KINDS, Router, Site, routed

FLAGS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-pages", "256", "--served-model-name", "tested")


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """SmolLM2, prefill and decode."""
    port = free_port()
    with pair((*FLAGS, "--bootstrap-port", str(port)), FLAGS) as (prefill, decode):
        yield Site(prefill, decode, port, "tested")


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, site: Site) -> Iterator[Router]:
    with routed(request.param, site) as made:
        yield made
