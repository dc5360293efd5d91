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
MODEL = "stub:layers=4,hidden=32"
STUB = ("--role", "prefill", "--dtype", DTYPE, "--chunk-tokens", "96")


STATE = {"name": "state", "dtype": "uint8", "layers": 4, "kv_heads": 1, "head_dim": 8, "planes": 1, "per_request": True}


@pytest.fixture(scope="session", params=["plain", pytest.param("states", marks=pytest.mark.full)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """HEADRACE_LAYERS, _KV_HEADS, _HEAD_DIM and _DTYPE describe the KV of another server than ours, HEADRACE_COMPONENTS
    (a list of their maps, in JSON) what it has beside that. Ours has the dtype of HEADRACE_DTYPE, too. It is tried
    with states of requests besides."""
    url, states = os.environ.get("HEADRACE_URL"), request.param == "states"
    if url is None:
        model = f"{MODEL},states=1" if states else MODEL
        with serving(*STUB, "--model", model) as server:
            yield _target(server.url, [STATE] if states else [])
    elif states:
        pytest.skip("HEADRACE_COMPONENTS says whether it has states")
    else:
        yield _target(url, json.loads(os.environ.get("HEADRACE_COMPONENTS", "[]")))


def _target(url: str, components: list[dict[str, Any]]) -> Target:
    handoff = httpx.get(f"{url}/v1/handoff").raise_for_status().json()
    sizes = {"layers": 4, "kv_heads": 1, "head_dim": 32}
    geometry: dict[str, Any] = {
        key: int(os.environ.get(f"HEADRACE_{key.upper()}", size)) for key, size in sizes.items()
    }
    geometry |= {"dtype": DTYPE, "page_size": 16}
    geometry["components"] = components
    host = httpx.URL(url).host
    return Target(url, f"tcp://{host}:{handoff['control_port']}", host, handoff["fingerprint"], geometry)


@pytest.fixture
def client(target: Target) -> Iterator[Client]:
    """A peer that does what it is told, with nothing said yet."""
    with zmq_context() as context:
        made = Client(context, target)
        yield made
        made.close()
