"""The prefill server under test: HEADRACE_URL names one of any make; by default it is ours, with the stub model."""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.client import Client, Target
from tests.e2e.harness import serving
from tests.transfer.harness import zmq_context

DTYPE = os.environ.get("HEADRACE_DTYPE", "float32")
STUB = ("--role", "prefill", "--model", "stub:layers=4,hidden=32", "--dtype", DTYPE, "--chunk-tokens", "96")


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """HEADRACE_LAYERS, _KV_HEADS, _HEAD_DIM and _DTYPE describe the KV of another server than ours, HEADRACE_COMPONENTS
    (a list of their maps, in JSON) what it has beside that. Ours has the dtype of HEADRACE_DTYPE, too."""
    url = os.environ.get("HEADRACE_URL")
    if url is None:
        with serving(*STUB) as server:
            yield _target(server.url)
    else:
        yield _target(url)


def _target(url: str) -> Target:
    handoff = httpx.get(f"{url}/v1/handoff").raise_for_status().json()
    sizes = {"layers": 4, "kv_heads": 1, "head_dim": 32}
    geometry: dict[str, Any] = {
        key: int(os.environ.get(f"HEADRACE_{key.upper()}", size)) for key, size in sizes.items()
    }
    geometry |= {"dtype": DTYPE, "page_size": 16}
    geometry["components"] = json.loads(os.environ.get("HEADRACE_COMPONENTS", "[]"))
    host = httpx.URL(url).host
    return Target(url, f"tcp://{host}:{handoff['control_port']}", host, handoff["fingerprint"], geometry)


@pytest.fixture
def client(target: Target) -> Iterator[Client]:
    """A peer that does what it is told, with nothing said yet."""
    with zmq_context() as context:
        made = Client(context, target)
        yield made
        made.close()
