"""Prometheus as a child process, with the configuration and the rules of this repository."""

import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from headrace.server.launch.free_port import free_port
from tests.deployment.files import PROMETHEUS, RULES, load_yaml

SCRAPE_S = 1
RATE_INTERVAL = "20s"
WHILE = re.compile(r"rate\((headrace_\w+\{[^}]*\})\[\$__rate_interval\]\)")
VARIABLES = {
    "$__rate_interval": RATE_INTERVAL,
    "$__range": "2m",
    "$instance": ".*",
    "$phase": ".*",
    "$objective": "2.5",
}

Values = dict[tuple[str, ...], float]


def executable() -> str | None:
    """The program, if it is installed."""
    return shutil.which("prometheus")


def filled(query: str) -> str:
    """A query of the dashboard with all servers chosen."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return query


def since_start(query: str) -> str:
    """The same query over counts since the servers started, in the place of rates."""
    return filled(WHILE.sub(r"\1", query))


class Monitor:
    """Asks a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30)

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer; raises AssertionError with the reason if there is none."""
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def ask(self, query: str, *labels: str) -> Values:
        """What a query finds now, by the values of these labels; without those that are not a number."""
        data = self.get("/api/v1/query", query=query)
        if data["resultType"] == "scalar":
            return {(): float(data["result"][1])}
        found = data["result"]
        values = {
            tuple(one["metric"].get(label, "") for label in labels or sorted(one["metric"])): float(one["value"][1])
            for one in found
        }
        assert len(values) == len(found) or not labels, f"{query} has more labels than {labels}"
        return {key: value for key, value in values.items() if not math.isnan(value)}

    def wait_scraped(self, targets: int) -> None:
        """Wait until every target was scraped twice from now on."""
        (before,) = self.ask("time()").values()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            scraped = self.ask('timestamp(up{job="headrace"} == 1)', "instance")
            if len(scraped) == targets and min(scraped.values()) > before + SCRAPE_S:
                return
            time.sleep(0.2)
        raise AssertionError(f"not all are scraped: {self.get('/api/v1/targets')}")

    def close(self) -> None:
        self._http.close()


@contextmanager
def monitoring(folder: Path, targets: Mapping[str, str]) -> Iterator[Monitor]:
    """Prometheus with configs/prometheus.yml, but for the addresses and the interval. targets: role by host:port."""
    program = executable()
    assert program is not None
    config = load_yaml(PROMETHEUS)
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(RULES)]
    (job,) = (job for job in config["scrape_configs"] if job["job_name"] == "headrace")
    job["static_configs"] = [{"targets": [address], "labels": {"role": role}} for address, role in targets.items()]
    config["scrape_configs"] = [job]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    monitor = Monitor(f"http://{address}")
    try:
        deadline = time.monotonic() + 30
        while not _is_up(address):
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.1)
        yield monitor
    finally:
        monitor.close()
        process.terminate()
        process.wait(30)


def _is_up(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/-/ready").status_code == 200
    except httpx.HTTPError:
        return False
