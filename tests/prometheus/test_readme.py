"""Prometheus beside a pair, by the README's command."""

import shlex
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from headrace.server.launch.free_port import free_port
from tests.deployment.files import PROMETHEUS, RULES
from tests.deployment.readme import PROMETHEUS as COMMAND
from tests.e2e.harness import pair, wait_until
from tests.prometheus.monitor import executable

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(executable() is None, reason="no Prometheus here; on Debian: apt-get install prometheus"),
]
STUB = ("--model", "stub")


def test_the_pair_of_the_readme_is_scraped(tmp_path: Path) -> None:
    """On other ports, and with its data elsewhere."""
    local = PROMETHEUS.with_stem("prometheus-local")
    shutil.copytree(RULES.parent, tmp_path / "rules")
    port = free_port()
    with pair(STUB, STUB) as (prefill, decode):
        text = local.read_text().replace(":8000", f":{prefill.port}").replace(":8001", f":{decode.port}")
        (tmp_path / local.name).write_text(text)
        command = COMMAND.replace(f"configs/{local.name}", str(tmp_path / local.name))
        words = shlex.split(command.replace("/tmp/headrace-prometheus", str(tmp_path / "data")))
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
        try:
            with closing(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)) as http:
                wait_until(lambda: _is_ready(http), 30, "Prometheus is ready")
                wait_until(lambda: _up(http) == {"prefill": "1", "decode": "1"}, 30, "both servers are scraped")
                groups = http.get("/api/v1/rules").json()["data"]["groups"]
                assert {group["name"] for group in groups} == {"headrace"}
        finally:
            process.terminate()
            process.wait(20)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def _up(http: httpx.Client) -> dict[str, str]:
    found = http.get("/api/v1/query", params={"query": 'up{job="headrace"}'}).json()["data"]["result"]
    return {series["metric"]["role"]: series["value"][1] for series in found}
