"""Dynamo's own vLLM workers that decode behind the gateway: stock frontend, `headrace dynamo prefill`, dynamo.vllm.

HEADRACE_VLLM_DYNAMO names the environment of dynamo.vllm, HEADRACE_DYNAMO that of the others, as make test-vllm does.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.vllm_server import NAME, ON_CPU, THREADS, Vllm, takes_by_nixl
from headrace.server.launch.free_port import free_port
from tests.deployment.files import ROOT
from tests.e2e.harness import Server, pages_in_use, wait_until
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, own
from tests.integrations.vllm.sides import prompt
from tests.routers.dynamo import PYTHON, frontend
from tests.routers.fleet import Child, Router
from tests.routers.test_texts import streamed, texts

ENVIRONMENT = os.environ.get("HEADRACE_VLLM_DYNAMO", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not ENVIRONMENT, reason="HEADRACE_VLLM_DYNAMO names no environment with dynamo.vllm"),
]
BLOCK = 128  # tokens, vLLM's default on CPUs


class Chain:
    """frontend ─┬─► headrace dynamo prefill ─► gateway ─► prefill server
    └─► dynamo.vllm, which reads from the gateway"""

    def __init__(self, model: Path, prefill: Server, stack: ExitStack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        side, self._system, port = free_port(), free_port(), free_port()
        planes = {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        dynamo = {"DYN_FILE_KV": folder, "DYN_DISCOVERY_BACKEND": "file", **planes}
        nixl = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side)}
        operators = {"PYTHONPATH": str(Path(__file__).parent / "in_dynamo_vllm")}
        self.worker = stack.enter_context(closing(Child(
            "dynamo.vllm", Path(ENVIRONMENT, "bin/python"), "-m", "dynamo.vllm", "--model", model, "--dtype", "float32",
            "--enforce-eager", "--served-model-name", NAME, "--max-model-len", "4096", "--max-num-seqs", "4",
            "--disaggregation-mode", "decode", "--kv-transfer-config", json.dumps(takes_by_nixl()),
            DYN_SYSTEM_PORT=str(self._system), **dynamo, **nixl, **operators, **THREADS, **ON_CPU,
        )))  # fmt: skip
        wait_until(lambda: self.ready() or self.worker.process.poll() is not None, 300, "dynamo.vllm is ready")
        assert self.ready(), self.worker.log
        card = {"id": NAME, "root": str(model), "max_model_len": 4096}
        flags = (
            "--decode",
            f"http://127.0.0.1:{self._system}=127.0.0.1:{side}",
            "--decode-model-card",
            json.dumps(card),
        )
        self.gateway = stack.enter_context(
            closing(Server(*flags, "--prefill", prefill.url, command="gateway"))
        ).started()
        flags = ("--url", self.gateway.url, "--model-path", str(model), "--block-size", str(BLOCK))
        command = (PYTHON, "-m", "headrace.cli.commands", "dynamo", "prefill", *flags)
        stack.enter_context(closing(Child("prefill worker", *command, PYTHONPATH=str(ROOT / "src"), **dynamo)))
        self.frontend = Router("dynamo", PYTHON, *frontend(port), port=port, **dynamo)
        stack.enter_context(closing(self.frontend))
        self.frontend.wait_ready({**GREEDY, "prompt": "ready"})

    def _get(self, path: str) -> str:
        try:
            return httpx.get(f"http://127.0.0.1:{self._system}{path}", timeout=10, trust_env=False).text
        except httpx.TransportError:
            return ""

    def ready(self) -> bool:
        return '"generate":"ready"' in self._get("/health")

    def tokens(self, source: str) -> float:
        """Prompt tokens that dynamo.vllm has from a source."""
        lines = [line for line in self._get("/metrics").splitlines() if f'source="{source}"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines if "prompt_tokens_by_source_total{" in line)


@pytest.fixture(scope="module")
def expected(vllm: Vllm) -> dict[int, str]:
    """What a stock vLLM makes of the prompts, by their length."""
    return {length: own(vllm, COMPLETION, body(length))[0] for length in (7, 65, 128, 300)}


@pytest.fixture(scope="module")
def chain(
    folder: Callable[[str], Path], prefill: Server, expected: dict[int, str], others_stopped: None
) -> Iterator[Chain]:
    with ExitStack() as stack:
        yield Chain(folder("float32"), prefill, stack)


def body(length: int) -> dict[str, Any]:
    return {**GREEDY, "prompt": prompt(length, at=length)}


def test_its_texts_are_vllms_own_and_all_tokens_are_loaded(
    chain: Chain, expected: dict[int, str], prefill: Server
) -> None:
    computed = chain.tokens("local_compute")
    for length, text in expected.items():
        loaded = chain.tokens("external_kv_transfer") + length
        assert texts(chain.frontend.post(COMPLETION, body(length)))[0] == text
        wait_until(lambda loaded=loaded: chain.tokens("external_kv_transfer") == loaded, 5, "all are loaded")
    assert chain.tokens("local_compute") == computed
    for server in (chain.gateway, prefill):
        wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")


def test_streams(chain: Chain, expected: dict[int, str]) -> None:
    answer = chain.frontend.post(COMPLETION, {**body(65), "stream": True})
    assert streamed(answer)[0] == expected[65]
