"""A vLLM server on the CPU as a child process, from its own environment (make test-vllm makes it)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from headrace.engine.model.source import resolve_source
from headrace.integrations.http_client import direct_client
from headrace.server.launch.free_port import free_port

_ENVIRONMENT = Path(__file__).resolve().parents[1] / ".venv-vllm"
PYTHON = Path(os.environ.get("HEADRACE_VLLM_PYTHON", _ENVIRONMENT / "bin/python"))
# Headrace as it is installed into vLLM's environment, but in a folder that only a vLLM with the connector looks into.
INSTALLED = Path(os.environ.get("HEADRACE_VLLM_CONNECTOR", _ENVIRONMENT / "connector"))
READY_S = 400.0
NAME = "smollm2"
LOADED = 'source="external_kv_transfer"'  # label of tokens that a KV connector loaded
CONNECTOR = "headrace.integrations.vllm.connector:HeadraceConnector"
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # GiB; and no internet


def export_smollm2(folder: Path, dtype: str = "float32") -> Path:
    """Write SmolLM2 as a Hugging Face folder, with the weights of the GGUF file that prefill servers read; returns
    it."""
    from transformers import PreTrainedTokenizerFast

    path = Path(resolve_source(NAME).path)
    export(path, folder, dtype)
    PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    return folder


def export(path: Path, folder: Path, dtype: str = "float32") -> None:
    """Write a GGUF file's weights as a Hugging Face folder, for engines that do not read GGUF."""
    from transformers import AutoModelForCausalLM, GgufConfig

    options = {"dtype": dtype, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, **options).save_pretrained(folder)


def takes_from_headrace(connector: str = CONNECTOR, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    """A --kv-transfer-config. connector: MODULE:CLASS. policy: kv_load_failure_policy. extra:
    kv_connector_extra_config."""
    module, name = connector.split(":")
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def takes_by_nixl(role: str = "kv_consumer", **extra: Any) -> dict[str, Any]:
    """A --kv-transfer-config for vLLM's own NixlConnector, which recomputes what it cannot load. extra: more keys."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        **extra,
    }


def metric(client: httpx.Client, name: str, label: str = "") -> float:
    """Sum of the samples of a vLLM's metric whose labels contain this text."""
    page = client.get("/metrics").text
    found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


def loaded_tokens(client: httpx.Client) -> float:
    """Prompt tokens whose KV a vLLM's connector has loaded."""
    return metric(client, "vllm:prompt_tokens_by_source_total", LOADED)


class Ports(NamedTuple):
    """Loopback ports of a vLLM."""

    http: int
    side_channel: int  # where its NixlConnector answers handshakes


class Vllm:
    """One vLLM API server; started at once, ended by close()."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        *flags: str,
        dtype: str = "float32",
        modules: Sequence[Path] = (),
        environment: Mapping[str, str] = THREADS,
        python: Path = PYTHON,
        ports: Ports | None = None,
        cores: Collection[int] = (),
    ) -> None:
        """model: a Hugging Face folder. transfer: its --kv-transfer-config; None starts it without. modules: folders of
        modules that it can import besides its environment's. environment: variables besides this process's own. python:
        interpreter of its environment. ports: free ones unless given. cores: to which it is confined once it is ready;
        none: not at all."""
        self.ports = ports or Ports(free_port(), free_port())
        self._cores = cores
        self.url = f"http://127.0.0.1:{self.ports.http}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", dtype,
            "--enforce-eager", "--served-model-name", NAME, "--max-model-len", "4096", "--port", str(self.ports.http),
            "--host", "127.0.0.1", *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()), *flags,
        ]  # fmt: skip
        channel = {"HOST": "127.0.0.1", "PORT": str(self.ports.side_channel)}
        nixl = {f"VLLM_NIXL_SIDE_CHANNEL_{name}": value for name, value in channel.items()}
        self.environment = {**os.environ, **ON_CPU, **nixl, **environment, "PYTHONPATH": ":".join(map(str, modules))}
        self.folder = model  # where it runs: python -m imports from there first, and so not from this repository
        self.process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env=self.environment, cwd=model,
            start_new_session=True,
        )  # fmt: skip
        self._alone: dict[tuple[int, ...], str] = {}
        self.client = direct_client(base_url=self.url, timeout=120)

    @property
    def log(self) -> str:
        """What it has printed."""
        return os.pread(self._output.fileno(), 8 << 20, 0).decode(errors="replace")

    def wait_ready(self) -> None:
        """Wait for /health. Raises AssertionError, with the log, when it ends or takes longer than READY_S."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"vLLM has ended:\n{self.log[-6000:]}"
            try:
                if self.client.get("/health").status_code == 200:
                    self._confine()
                    return
            except httpx.TransportError:
                time.sleep(0.25)
        raise AssertionError(f"vLLM is not ready within {READY_S:g} s:\n{self.log[-6000:]}")

    def _confine(self) -> None:
        """Allow its cores only to each thread of its session."""
        if not self._cores:
            return
        for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if os.getsid(int(task.parts[2])) == self.process.pid:
                    os.sched_setaffinity(int(task.name), self._cores)

    def complete(self, prompt: list[int], params: dict[str, Any] | None = None, **more: Any) -> httpx.Response:
        """Complete a prompt greedily with 12 tokens. A salt of its own keeps each call from using cached prefixes of
        others.

        params: kv_transfer_params. more: further fields of the body.
        """
        body = {
            "model": NAME, "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True,
            "cache_salt": os.urandom(8).hex(), **more,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        return self.client.post("/v1/completions", json=body)

    def text(self, prompt: list[int], params: dict[str, Any] | None = None, **more: Any) -> str:
        """Text of complete(). Raises AssertionError, with the log, for an error answer."""
        answer = self.complete(prompt, params, **more)
        assert answer.status_code == 200, f"{answer.text}\n{self.log[-4000:]}"
        return str(answer.json()["choices"][0]["text"])

    def alone(self, prompt: list[int]) -> str:
        """Text that vLLM computes itself, without kv_transfer_params; cached by prompt."""
        key = tuple(prompt)
        if key not in self._alone:
            self._alone[key] = self.text(prompt)
        return self._alone[key]

    def metric(self, name: str, label: str = "") -> float:
        """Sum of a metric's samples whose labels contain this text."""
        return metric(self.client, name, label)

    def loaded_tokens(self) -> float:
        """Prompt tokens whose KV a connector has loaded."""
        return loaded_tokens(self.client)

    def idle(self) -> bool:
        """Whether no request is open and no block of the KV cache is in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It gets no processor meanwhile; an idle NixlConnector would keep one busy."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash would."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it and the processes that it started."""
        self.signal(signal.SIGCONT)
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()
        self.client.close()
        self._output.close()


@contextmanager
def serving_vllm(*arguments: Any, **options: Any) -> Iterator[Vllm]:
    """A ready Vllm for the length of a with block; arguments as for Vllm."""
    server = Vllm(*arguments, **options)
    try:
        server.wait_ready()
        yield server
    finally:
        print(server.log[-12000:])  # pytest shows it when a test fails
        server.close()
