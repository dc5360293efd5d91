"""Routers as child processes, from the environment that `make test-routers` makes."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx

from headrace.server.launch.free_port import free_port
from tests.e2e.harness import Server, pages_in_use, wait_until

READY_S = 60.0
BIN = Path(os.environ.get("HEADRACE_ROUTERS", ".venv-routers")) / "bin"


class Behind(Protocol):
    """What a router has to know of the servers behind it."""

    @property
    def prefill_urls(self) -> Sequence[str]: ...
    @property
    def decode_urls(self) -> Sequence[str]: ...
    @property
    def bootstrap_port(self) -> int: ...
    @property
    def model(self) -> str: ...


class Site(NamedTuple):
    """A prefill server, a decode server, and what a router has to know of them."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    model: str

    @property
    def prefill_urls(self) -> tuple[str, ...]:
        return (self.prefill.url,)

    @property
    def decode_urls(self) -> tuple[str, ...]:
        return (self.decode.url,)

    def quiet(self) -> None:
        """Wait until no server holds pages."""
        for server in (self.prefill, self.decode):
            if server.process.poll() is None:
                wait_until(lambda server=server: pages_in_use(server) == 0, 20, f"pages are back\n{server.log}")


class Child:
    """A process of a router, from an environment of its own."""

    def __init__(self, name: str, *command: str | Path, **variables: str) -> None:
        self.name = name
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        environment = {**os.environ, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", **variables}
        for key in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "OPENAI_API_KEY"):
            environment.pop(key, None)
        self.process = subprocess.Popen(
            list(map(str, command)), stdout=self._output, stderr=subprocess.STDOUT, env=environment
        )

    @property
    def log(self) -> str:
        return os.pread(self._output.fileno(), 1 << 22, 0).decode(errors="replace")[-6000:]

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._output.close()


class Router(Child):
    """A router in front of prefill servers and decode servers."""

    def __init__(self, name: str, program: Path, *command: str, port: int, **variables: str) -> None:
        super().__init__(name, program, *command, **variables)
        self.url = f"http://127.0.0.1:{port}"

    def wait_ready(self, body: dict[str, Any]) -> None:
        """Until a request is served. Routers open their port before, or long after, they know their servers."""
        deadline = time.monotonic() + READY_S
        while True:
            assert self.process.poll() is None, f"{self.name} has ended:\n{self.log}"
            assert time.monotonic() < deadline, f"{self.name} does not serve:\n{self.log}"
            try:
                if self.post("/v1/completions", body).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=20, trust_env=False)


KINDS = ("vllm-nixl", "vllm-mooncake", "vllm-mini-lb", "sglang", "sglang-mini-lb", "xpyd", "dynamo")


def start(kind: str, site: Behind, folder: Path, *flags: str) -> Router:
    """One of KINDS in front of the servers. folder: for a configuration file. flags: more of its own."""
    port = free_port()
    place = ("--host", "127.0.0.1", "--port", str(port))
    decodes = [flag for url in site.decode_urls for flag in ("--decode", url)]
    without_port = [flag for url in site.prefill_urls for flag in ("--prefill", url)] + decodes
    pair = [flag for url in site.prefill_urls for flag in ("--prefill", url, str(site.bootstrap_port))] + decodes
    metrics = ("--prometheus-port", str(free_port()))
    match kind:
        case "vllm-nixl":
            command = ["vllm-router", *place, "--vllm-pd-disaggregation", *without_port, *metrics]
        case "vllm-mooncake":
            command = ["vllm-router", *place, "--vllm-pd-disaggregation", "--kv-connector", "mooncake", *pair, *metrics]
        case "vllm-mini-lb":
            command = ["vllm-router", *place, "--mini-lb", "--vllm-pd-disaggregation", *pair]
        case "sglang":
            command = ["sglang-router", "launch", *place, "--pd-disaggregation", *pair, *metrics]
        case "sglang-mini-lb":
            command = ["sglang-router", "launch", *place, "--mini-lb", "--pd-disaggregation", *pair]
        case _:
            command = ["xpyd", "proxy", "--config", _xpyd_config(folder, port, site)]
    return Router(kind, BIN / command[0], *command[1:], *flags, port=port)


def _xpyd_config(folder: Path, port: int, site: Behind) -> str:
    path = folder / "xpyd.yaml"
    prefills, decodes = (
        [url.removeprefix("http://") for url in urls] for urls in (site.prefill_urls, site.decode_urls)
    )
    path.write_text(
        f"""
        model: "{site.model}"
        prefill: {json.dumps(prefills)}
        decode: {json.dumps(decodes)}
        host: "127.0.0.1"
        port: {port}
        disaggregated_mode: "nixl"
        log_level: "info"
        startup: {{wait_timeout_seconds: 60, probe_interval_seconds: 1, heartbeat_interval_seconds: 2}}
        """
    )
    return str(path)


@contextmanager
def routed(kind: str, site: Behind, *flags: str) -> Iterator[Router]:
    """A router that serves. flags: more of its own."""
    if kind == "dynamo":
        from tests.routers.dynamo import dynamo  # which is a router, too

        with dynamo(site, *flags) as made:
            yield made
        return
    with tempfile.TemporaryDirectory() as folder:
        router = start(kind, site, Path(folder), *flags)
        try:
            router.wait_ready({"model": site.model, "prompt": "ready", "max_tokens": 1, "temperature": 0})
            yield router
        finally:
            print(router.log)  # shown when the test fails
            router.close()
