"""The profile vllm of docker-compose.yml, with stock vLLM, each service on a machine of its own: make test-vllm.

No images: a machine has namespaces for network, processes and IPC, a /dev/shm and an /etc/hosts. The services' commands
and environments are those of the file, but for what makes vLLM run on a CPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.vllm_server import NAME, ON_CPU, PYTHON, READY_S, THREADS, loaded_tokens
from tests.deployment.files import COMPOSE, load_yaml
from tests.deployment.test_compose import interpolate
from tests.e2e.harness import wait_until
from tests.e2e.machines import Machine, machines
from tests.gateway.vllm_nixl.fleet import ASKED
from tests.gateway.vllm_nixl.texts import COMPLETION, GREEDY, fresh, loaded
from tests.integrations.vllm.sides import prompt

pytestmark = pytest.mark.vllm
KEY = "a-key-of-the-test"
SERVICES = ("prefill", "gateway", "vllm")
# As a container has them.
ISOLATED = ("unshare", "--mount", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c")
PREPARED = 'mount --bind "$0" /etc/hosts && mount -t tmpfs -o size=2g shm /dev/shm && exec "$@"'


class Service:
    """A service of the file, running on a machine."""

    def __init__(self, machine: Machine, hosts: Path, command: list[str], environment: dict[str, str]) -> None:
        self.url = f"http://{machine.address}:8000"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [*machine.prefix, *ISOLATED, PREPARED, str(hosts), *command],
            stdout=self._output, stderr=subprocess.STDOUT, env={**os.environ, **environment},
        )  # fmt: skip
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120, trust_env=False
        )

    @property
    def log(self) -> str:
        return os.pread(self._output.fileno(), 8 << 20, 0).decode(errors="replace")

    def answers(self, path: str) -> bool:
        """Whether a GET is answered with 200. Raises AssertionError when the service has ended."""
        assert self.process.poll() is None, self.log[-6000:]
        try:
            return self.client.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> int:
        """SIGTERM to its first process, as compose does it; its exit status."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(signal.SIGTERM)
        return self.process.wait(45)

    def close(self) -> None:
        """Kill what is left of it, and show what it has said: pytest prints it when the test fails."""
        self.process.kill()
        self.process.wait(10)
        self.client.close()
        print(self.log[-20000:])
        self._output.close()


def on_cpu(command: list[str], folder: Path) -> list[str]:
    """vLLM's command for a CPU and for weights in a folder."""
    name, transfer = command[-1].split("=", 1)
    assert name == "--kv-transfer-config"
    buffer = {**json.loads(transfer), "kv_buffer_device": "cpu"}
    sizes = ("--enforce-eager", "--max-model-len=4096", "--max-num-seqs=4")
    model = (f"--model={folder}", f"--served-model-name={NAME}")
    return [*command[:-1], *model, *sizes, f"{name}={json.dumps(buffer)}"]


@pytest.fixture(scope="module")
def profile(folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Service]]:
    """The services, ready."""
    model, hosts = folder("float32"), tmp_path_factory.mktemp("etc") / "hosts"
    variables = {"HEADRACE_API_KEY": KEY, "HEADRACE_MODEL": NAME, "HEADRACE_DTYPE": "float32"}
    services: dict[str, Any] = interpolate(load_yaml(COMPOSE)["services"], variables)
    headrace = [sys.executable, "-m", "headrace.cli.commands"]
    with ExitStack() as stack:
        where = dict(zip(SERVICES, stack.enter_context(machines(len(SERVICES))), strict=True))
        if not where["vllm"].prefix:
            pytest.skip("network namespaces are not allowed here")
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at.address} {name}\n" for name, at in where.items()))
        commands = {
            "prefill": [*headrace, *services["prefill"]["command"], "--max-model-len=4096", "--threads=1"],
            "gateway": [*headrace, *services["gateway"]["command"]],
            "vllm": [
                str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *on_cpu(services["vllm"]["command"], model)
            ],
        }  # fmt: skip
        started: dict[str, Service] = {}
        for name, command in commands.items():
            environment = {**services[name]["environment"], **(THREADS | ON_CPU if name == "vllm" else {})}
            service = Service(where[name], hosts, command, environment)
            started[name] = stack.enter_context(closing(service))
        for name in ("prefill", "vllm", "gateway"):
            path = "/health" if name == "vllm" else "/ready"
            wait_until(lambda name=name, path=path: started[name].answers(path), READY_S, f"{name} is ready")
        yield started


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def through(profile: dict[str, Service], body: dict[str, Any]) -> str:
    """A router's two requests: to the gateway, and to vLLM with what it has answered."""
    body = fresh(body)
    answer = profile["gateway"].client.post(COMPLETION, json={**body, "max_tokens": 1, "kv_transfer_params": ASKED})
    assert answer.status_code == 200, answer.text
    params = answer.json()["kv_transfer_params"]
    return text(profile["vllm"].client.post(COMPLETION, json={**body, "kv_transfer_params": params}))


@pytest.mark.parametrize("length", [1, 7, 129, 700, 2000])
def test_texts_are_vllms_own(profile: dict[str, Service], length: int) -> None:
    body, vllm = {**GREEDY, "prompt": prompt(length, at=1300)}, profile["vllm"].client
    expected = text(vllm.post(COMPLETION, json=fresh(body)))
    before = loaded_tokens(vllm)
    assert through(profile, body) == expected
    wait_until(lambda: loaded_tokens(vllm) - before >= loaded(length), 5, "the KV was loaded")
    assert loaded_tokens(vllm) - before == loaded(length)


def test_a_stranger_is_refused_everywhere(profile: dict[str, Service]) -> None:
    for service in profile.values():
        answer = httpx.post(f"{service.url}{COMPLETION}", json={**GREEDY, "prompt": [1]}, trust_env=False)
        assert answer.status_code == 401


def test_compose_stops_the_gateway_and_vllm_goes_on(profile: dict[str, Service]) -> None:
    assert profile["gateway"].stop() == 0, profile["gateway"].log
    assert text(profile["vllm"].client.post(COMPLETION, json=fresh({**GREEDY, "prompt": prompt(7, at=1300)})))
