"""A pair of servers under attack: what honest clients notice, and what memory and CPU it costs.

`python -m benchmarks.attacks` starts a prefill server and a decode server with a model that computes nothing. An honest
client sends one prompt after the other through both. Each attack of benchmarks.attackers runs for some seconds, at
all ports that it can be meant for. Attackers share this machine's cores with the servers: a second client without an
attack, beside processes that only compute, shows what of the delay is that.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from typing import NamedTuple

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.arguments import make_parser
from benchmarks.attackers import KINDS
from benchmarks.report import console, print_table, run
from benchmarks.server import serving
from headrace.integrations.http_client import direct_client
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

MODEL = ("--model", "stub:layers=4,hidden=32", "--max-model-len", "4096")
BUSY = "while True: pass"
PAUSE_S = 0.02
MIB = 1 << 20


class Target(NamedTuple):
    """An attack, and the ports that one attacker each is let loose on."""

    kind: str
    title: str
    ports: tuple[tuple[int, ...], ...]


class Seen(NamedTuple):
    """What an attack did."""

    latencies_ms: list[float]
    failed: int
    memory_mib: float
    """The most that all processes of the two servers took together."""
    cpu_cores: float
    """Of the servers' processes."""


@contextmanager
def processes(commands: Sequence[Sequence[str]]) -> Iterator[None]:
    """These commands for the length of a with block."""
    started = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def members(servers: Sequence[LocalServer]) -> list[psutil.Process]:
    """The processes of the servers."""
    roots = [psutil.Process(server.process.pid) for server in servers]
    return [each for root in roots for each in (root, *root.children(recursive=True))]


def watch(servers: Sequence[LocalServer], seconds: float) -> Seen:
    """Send honest prompts for so many seconds, and look at the servers meanwhile."""
    latencies, failed, peak, number = [], 0, 0.0, 0
    everyone = members(servers)
    cpu_before, began = sum(sum(each.cpu_times()[:2]) for each in everyone), time.monotonic()
    with direct_client(base_url=servers[1].url, timeout=60) as http:
        while time.monotonic() < began + seconds:
            number += 1
            started = time.perf_counter()
            body = {"prompt": f"prompt {number} {started}", "max_tokens": 4, "temperature": 0}
            try:
                failed += http.post("/v1/completions", json=body).status_code != 200
            except httpx.HTTPError:
                failed += 1
            latencies.append(1000 * (time.perf_counter() - started))
            peak = max(peak, sum(each.memory_info().rss for each in everyone) / MIB)
            time.sleep(PAUSE_S)
    cpu = sum(sum(each.cpu_times()[:2]) for each in everyone) - cpu_before
    return Seen(latencies, failed, peak, cpu / (time.monotonic() - began))


def row(title: str, seen: Seen, base: Seen) -> tuple[str, ...]:
    """A row of the table."""
    p99 = quantiles([*seen.latencies_ms, max(seen.latencies_ms)], n=100)[98]
    return (
        title,
        f"{len(seen.latencies_ms)}",
        f"{seen.failed}",
        f"{median(seen.latencies_ms):,.1f}",
        f"{p99:,.1f}",
        f"{max(seen.latencies_ms):,.0f}",
        f"{seen.memory_mib - base.memory_mib:+,.0f}",
        f"{seen.cpu_cores:.2f}",
    )


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ServerFailed."""
    parser = make_parser("attacks", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, metavar="SECONDS", help="length of each attack")
    parser.add_argument("--only", nargs="+", choices=sorted(KINDS), default=sorted(KINDS), help="which attacks")
    given = parser.parse_args(arguments)
    control, data = free_port(), free_port()
    flags = ("--role", "prefill", *MODEL, "--control-port", str(control), "--data-port", str(data))
    with serving(*flags) as prefill, serving("--role", "decode", "--prefill", prefill.url, *MODEL) as decode:
        http, front = (int(server.url.rpartition(":")[2]) for server in (prefill, decode))
        targets = [
            Target("idle", "10,000 idle connections", ((http, front, control, data),)),
            Target("rubbish", "rubbish at control endpoint and data port", ((control,), (data,))),
            Target("requests", "requests whose answers are not read", ((http,), (front,))),
            Target("reconnects", "handshakes without end", ((control,), (data,))),
            Target("stalled", "200 bodies of 16 MiB, half sent", ((http, front),)),
            Target("bodies", "bodies of 16 MiB", ((front,), (http,))),
        ]
        servers = (prefill, decode)
        watch(servers, 2)
        base = watch(servers, given.seconds)
        rows = [row("none", base, base)]
        with processes([(sys.executable, "-c", BUSY)] * 2):
            rows.append(row("none, beside two busy processes", watch(servers, given.seconds), base))
        for target in targets:
            if target.kind not in given.only:
                continue
            commands = [
                (sys.executable, "-m", "benchmarks.attackers", target.kind, *map(str, ports)) for ports in target.ports
            ]
            with console.status(target.title), processes(commands):
                time.sleep(2)
                seen = watch(servers, given.seconds)
            rows.append(row(target.title, seen, base))
            time.sleep(2)
        rows.append(row("none, afterwards", watch(servers, given.seconds), base))
    columns = ("attack", "prompts", "failed", "p50 ms", "p99 ms", "longest ms", "memory MiB", "server cores")
    print_table(f"a pair under attack, {given.seconds:g} s each", columns, rows)
    return 0


if __name__ == "__main__":
    run(main)
