"""Stock vLLMs for the tests of the gateway, and what is between them and the prompts' KV.

An idle NixlConnector keeps a core busy. So all vLLMs but one are stopped (SIGSTOP), and go on for the tests that name
them.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_server import Vllm, export_smollm2
from tests.e2e.harness import Server, serving
from tests.gateway.vllm_nixl.fleet import PREFILL, Site, gateway_of, stock
from tests.routers.fleet import Router, routed

ENGINES = ("vllm", "bfloat16", "versioned")


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """SmolLM2 for vLLM in a dtype: the same weights as the prefill server's GGUF file."""
    return cache(lambda dtype: export_smollm2(tmp_path_factory.mktemp(dtype), dtype))


@pytest.fixture(scope="package")
def engines(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> Iterator[dict[str, Vllm]]:
    """The vLLMs that the collected tests name, started at the same time."""
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as stack:
        made: dict[str, Vllm] = {}
        for name in (name for name in ENGINES if name in asked):
            dtype = "bfloat16" if name == "bfloat16" else "float32"
            made[name] = stack.enter_context(closing(stock(folder(dtype), dtype, versioned=name == "versioned")))
        for name, engine in made.items():
            engine.wait_ready()
            if name != "vllm":
                engine.signal(signal.SIGSTOP)
        yield made


@pytest.fixture(scope="package")
def vllm(engines: dict[str, Vllm]) -> Vllm:
    """A stock vLLM in float32."""
    return engines["vllm"]


def awake(engine: Vllm) -> Iterator[Vllm]:
    engine.signal(signal.SIGCONT)
    yield engine
    engine.signal(signal.SIGSTOP)


@pytest.fixture
def second(vllm: Vllm, folder: Callable[[str], Path]) -> Iterator[Vllm]:
    """Another one of the same kind, for one test: one that was stopped for half an hour refused connections."""
    with closing(stock(folder("float32"), "float32")) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture(scope="module")
def others_stopped(engines: dict[str, Vllm]) -> Iterator[None]:
    """No vLLM of the package runs, for a module that has its own."""
    with engines["vllm"].stopped() if "vllm" in engines else ExitStack():
        yield


@pytest.fixture(scope="module")
def bfloat16(engines: dict[str, Vllm], others_stopped: None) -> Iterator[Vllm]:
    """One in bfloat16."""
    yield from awake(engines["bfloat16"])


@pytest.fixture
def versioned(engines: dict[str, Vllm]) -> Iterator[Vllm]:
    """One whose NixlConnector has another version."""
    yield from awake(engines["versioned"])


@pytest.fixture(scope="package")
def prefill() -> Iterator[Server]:
    """A prefill server that knows nothing of vLLM."""
    with serving(*PREFILL) as made:
        yield made


@pytest.fixture(scope="package")
def site(vllm: Vllm, prefill: Server) -> Iterator[Site]:
    """One prefill server, the gateway, one vLLM."""
    with gateway_of((vllm,), (prefill,)) as made:
        yield made


@pytest.fixture(scope="module")
def staged(vllm: Vllm) -> Iterator[Site]:
    """A prefill server of two pipeline stages."""
    with serving(*PREFILL, "--pp", "2") as server, gateway_of((vllm,), (server,)) as made:
        yield made


@pytest.fixture(scope="package")
def router(site: Site) -> Iterator[Router]:
    """vllm-router before them."""
    with routed("vllm-nixl", site) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, whatever became of it: pages and leases of the gateway, pages of prefill servers and blocks of vLLM
    are free."""
    yield
    if "site" in request.fixturenames:
        found: Any = request.getfixturevalue("site")
        found.quiet()
