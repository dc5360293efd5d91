"""Stock SGLang engines for the tests of the gateway, and what is between them and the prompts' KV."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.vllm_server import export_smollm2
from tests.e2e.harness import Server, serving
from tests.engine.models import Saved
from tests.gateway.sglang_engine.engine import Sglang, serving_sglang
from tests.gateway.sglang_engine.llama import made
from tests.gateway.sglang_engine.site import PAGE, PREFILL, Site, gateway_of


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 for SGLang: the same weights as the prefill server's GGUF file."""
    return export_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A small random model."""
    return made(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="package")
def engine(folder: Path) -> Iterator[Sglang]:
    """With a radix cache of prompts, checksums of the metadata row, and cached tokens in its answers."""
    flags = ("--disaggregation-decode-enable-radix-cache", "--disaggregation-enable-kv-checksum")
    with serving_sglang(folder, "--page-size", str(PAGE), "--enable-cache-report", *flags) as started:
        yield started


@pytest.fixture(scope="package")
def prefill() -> Iterator[Server]:
    """A prefill server that knows nothing of SGLang."""
    with serving(*PREFILL) as server:
        yield server


@pytest.fixture(scope="module")
def site(engine: Sglang, prefill: Server) -> Iterator[Site]:
    """One prefill server, the gateway, one engine."""
    with gateway_of((engine,), (prefill,)) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, whatever became of it: pages of prefill servers, rooms of the gateway, requests and pages of the
    engine are free."""
    yield
    if "site" in request.fixturenames:
        found: Site = request.getfixturevalue("site")
        found.quiet()
