"""Pairs for the tests, and routers in front of them."""

from collections.abc import Iterator

import pytest

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import pair
from tests.routers.fleet import KINDS, Router, Site, routed

STUB = ("--model", "stub:layers=4,hidden=32", "--max-model-len", "2048", "--served-model-name", "tested")
SMOLLM2 = ("--dtype", "float32", "--max-model-len", "512", "--kv-pages", "128", "--served-model-name", "tested",
           "--threads", "1")  # fmt: skip


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    """The stub model, whose tokens follow from all of the prompt's KV: what is lost or misplaced shows."""
    port = free_port()
    with pair((*STUB, "--bootstrap-port", str(port)), STUB) as (prefill, decode):
        yield Site(prefill, decode, port, "tested")


@pytest.fixture(scope="session")
def real_site() -> Iterator[Site]:
    """A real model."""
    port = free_port()
    with pair((*SMOLLM2, "--bootstrap-port", str(port)), SMOLLM2) as (prefill, decode):
        yield Site(prefill, decode, port, "tested")


@pytest.fixture(scope="module", params=KINDS)
def router(request: pytest.FixtureRequest, site: Site) -> Iterator[Router]:
    with routed(request.param, site) as made:
        yield made
