"""Servers for the tests with a real vLLM and the connector: two of it and two prefill servers, started once for all of
them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.vllm_server import INSTALLED, Vllm, export_smollm2, serving_vllm, takes_from_headrace
from headrace.server.config.curve_keys import write_pair
from tests.e2e.harness import Server, pages_in_use, serving, wait_until
from tests.integrations.vllm.sides import BESIDE_OTHERS, FLAGS, Curve

VLLM_FLAGS = ("--max-num-seqs", "4", "--middleware", "headrace.integrations.vllm.middleware.BootstrapNames")


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a folder that vLLM reads: the same weights as the prefill server's GGUF file."""
    return export_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="package")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    folder = tmp_path_factory.mktemp("keys")
    public, secret = write_pair(folder, "prefill")
    _, ours = write_pair(folder / "allowed", "vllm")
    return Curve(
        flags=("--curve-key", str(secret), "--curve-allowed", str(folder / "allowed")),
        config={"curve_key": str(ours), "curve_server_keys": [str(public)]},
    )


@pytest.fixture(scope="package")
def prefill() -> Iterator[Server]:
    with serving(*FLAGS) as made:
        yield made


@pytest.fixture(scope="package")
def guarded(curve: Curve) -> Iterator[Server]:
    """A prefill server for encrypted connections."""
    with serving(*FLAGS, *curve.flags) as made:
        yield made


@pytest.fixture(scope="package")
def sharded() -> Iterator[Server]:
    """A prefill server of two tensor-parallel shards, which have one KV head and two."""
    with serving(*FLAGS, "--tp", "2") as made:
        yield made


@pytest.fixture(scope="package")
def vllm(model: Path) -> Iterator[Vllm]:
    """Recomputes what cannot be loaded."""
    with serving_vllm(model, takes_from_headrace(), *VLLM_FLAGS, modules=(INSTALLED,), **BESIDE_OTHERS) as made:
        yield made


@pytest.fixture(scope="package")
def strict(model: Path, curve: Curve) -> Iterator[Vllm]:
    """Fails what cannot be loaded, compares no prompts, and takes KV from the guarded server."""
    transfer = takes_from_headrace("unchecked:UncheckedConnector", policy="fail", **curve.config)
    modules = (INSTALLED, Path(__file__).parent / "in_vllm")
    with serving_vllm(model, transfer, modules=modules, **BESIDE_OTHERS) as made:
        yield made


@pytest.fixture
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test, whatever became of it: all pages of the prefill servers and all blocks of vLLM are free."""
    yield
    for name in {"prefill", "guarded", "sharded"} & set(request.fixturenames):
        server: Server = request.getfixturevalue(name)
        wait_until(lambda: pages_in_use(server) == 0, 20, f"pages of the prefill server are back\n{server.log}")  # noqa: B023
    for name in {"vllm", "strict"} & set(request.fixturenames):
        one: Vllm = request.getfixturevalue(name)
        wait_until(one.idle, 20, f"vLLM has nothing open\n{one.log[-4000:]}")
