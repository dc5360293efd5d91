"""An SGLang decode engine on the CPU as a child process, from its own environment (make test-sglang makes it)."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from headrace.integrations.http_client import direct_client
from headrace.server.launch.free_port import free_port

PYTHON = Path(os.environ.get("HEADRACE_SGLANG_PYTHON", ".venv-sglang/bin/python"))
LAUNCH = Path(__file__).parent / "in_sglang" / "launch.py"
READY_S = 400.0
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": "",
}  # fmt: skip
ON_CPU = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"),
    *("--disable-overlap-schedule", "--sleep-on-idle", "--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl")
SIZES = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--context-length", "4096")


class Sglang:
    """One SGLang server; started at once, ended by close()."""

    def __init__(self, model: Path, *flags: str, port: int = 0, environment: dict[str, str] | None = None) -> None:
        """model: a Hugging Face folder. flags: more of its own. port: a free one unless given."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        command = [
            str(PYTHON), str(LAUNCH), "--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port),
            *ON_CPU, *DECODE, *SIZES, *flags,
        ]  # fmt: skip
        self.environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT, cwd=model,
            env=self.environment, start_new_session=True,
        )  # fmt: skip
        self.client = direct_client(base_url=self.url, timeout=120)
        self._processes: list[psutil.Process] = []

    @property
    def log(self) -> str:
        """What it has printed."""
        return os.pread(self._output.fileno(), 8 << 20, 0).decode(errors="replace")

    def wait_ready(self) -> "Sglang":
        """Wait until it has answered its own warm-up. Raises AssertionError, with the log, when it ends or takes longer
        than READY_S."""
        deadline = time.monotonic() + READY_S
        while "The server is fired up" not in self.log:
            assert self.process.poll() is None, f"SGLang has ended:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"SGLang is not ready within {READY_S:g} s:\n{self.log[-6000:]}"
            time.sleep(0.25)
        here = psutil.Process(self.process.pid)
        self._processes = [here, *here.children(recursive=True)]
        return self

    def load(self) -> dict[str, Any]:
        """What its scheduler has open: requests that run and wait, tokens in use, requests whose KV is to come."""
        [found] = self.client.get("/v1/loads", params={"include": "all"}).json()["loads"]
        kinds = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        return {kind: found[kind] for kind in kinds} | found["disaggregation"]

    def idle(self) -> bool:
        """Whether no request is open and no page of the KV cache is in use."""
        return not any(value for name, value in self.load().items() if name.startswith(("num_", "decode_")))

    def signal(self, number: int) -> None:
        """Send a signal to it and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It gets no processor meanwhile."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End all its processes as a crash would."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(self._processes, timeout=10)

    def close(self) -> None:
        """End it and the processes that it started."""
        self.signal(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()
        self.client.close()
        self._output.close()


@contextmanager
def serving_sglang(model: Path, *flags: str, **options: Any) -> Iterator[Sglang]:
    """A ready engine for the length of a with block; arguments as for Sglang."""
    engine = Sglang(model, *flags, **options)
    try:
        yield engine.wait_ready()
    finally:
        print(engine.log[-12000:])  # pytest shows it when a test fails
        engine.close()


def answered(response: httpx.Response) -> dict[str, Any]:
    """The JSON of an answer with status 200."""
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found
