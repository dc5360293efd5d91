"""A prefill server for each file of tests, and a Headrace decode peer of it."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.harness import Server, serving
from tests.gateway.sglang_nixl.prefill_side import FLAGS, Reference


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(*FLAGS, "--kv-pages", "1024") as made:
        yield made


@pytest.fixture(scope="module")
def reference(server: Server) -> Iterator[Reference]:
    with closing(Reference(server)) as made:
        yield made
