"""docker-compose.yml run by podman-compose: a pair, its health, Prometheus, and a drain (make test-containers)."""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.deployment.files import COMPOSE, ROOT

pytestmark = pytest.mark.containers
IMAGE = "headrace:0.1.0"
KEY = "a-key-of-the-test"
DECODE, PREFILL = "http://127.0.0.1:8001", "http://127.0.0.1:8000"
PROMETHEUS = "http://127.0.0.1:9090"
START_S = 240.0
BODY = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0}


def run(*command: str, status: int | None = 0) -> str:
    environ = {**os.environ, "HEADRACE_API_KEY": KEY}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert status is None or done.returncode == status, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_ready(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until, f"{url} is not ready after {START_S:.0f} s"
        time.sleep(1)


@pytest.fixture(scope="module")
def pair() -> Iterator[None]:
    """Without dependencies: podman runs no health checks by itself where systemd does not run."""
    if shutil.which("podman-compose") is None or shutil.which("podman") is None:
        pytest.skip("podman and podman-compose are not installed")
    if not run("podman", "images", "--quiet", IMAGE):
        pytest.skip(f"there is no image {IMAGE}: build it first")
    compose = ("podman-compose", "--file", str(COMPOSE))
    try:
        run(*compose, "up", "--detach", "--no-build", "--no-deps", "prefill", "decode", "prometheus")
        wait_ready(f"{PREFILL}/ready")
        wait_ready(f"{DECODE}/ready")
        wait_ready(f"{PROMETHEUS}/-/ready")
        yield
    finally:
        run(*compose, "down", "--volumes", status=None)


def complete(client: httpx.Client, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={**BODY, **fields}, headers={"Authorization": f"Bearer {KEY}"})


@pytest.mark.usefixtures("pair")
def test_a_pair_runs_is_watched_and_drains() -> None:
    for name in ("prefill", "decode", "prometheus"):
        run("podman", "healthcheck", "run", f"headrace_{name}_1")
    with httpx.Client(base_url=DECODE, timeout=120) as client:
        assert client.get("/v1/models").status_code == 401
        answer = complete(client, max_tokens=4).json()
        assert answer["choices"][0]["text"].startswith(" Paris")
        assert answer["headrace"]["handoff"]["pages"] == 1
        wait_scraped()
        check_drain(client)
    state = run(
        "podman", "inspect", "--format", "{{.State.ExitCode}} {{.HostConfig.ReadonlyRootfs}}", "headrace_decode_1"
    )
    assert state.split() == ["0", "true"]


def wait_scraped() -> None:
    """Both servers are up in Prometheus, each with its role."""
    until = time.monotonic() + 60
    while True:
        found = httpx.get(f"{PROMETHEUS}/api/v1/query", params={"query": "headrace_ready == 1"}).json()
        if {each["metric"]["role"] for each in found["data"]["result"]} == {"prefill", "decode"}:
            return
        assert time.monotonic() < until, found
        time.sleep(1)


def check_drain(client: httpx.Client) -> None:
    """A text that streams when its container is told to stop ends whole; new requests are refused."""
    stopping = threading.Thread(target=run, args=("podman", "stop", "--time", "45", "headrace_decode_1"))
    body = {**BODY, "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        stopping.start()
        while client.get("/ready").status_code == 200:
            time.sleep(0.1)
        assert complete(client, max_tokens=1).json()["error"]["code"] == "draining"
        rest = [line for line in lines if line]
    stopping.join()
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
