"""False deaths on an overloaded machine: a prefill and a decode server beside busy processes.

`python -m benchmarks.overload --minutes 10 --busy 16`. Clients send prompts through the decode server all the time.
Every death is false, since nothing is killed: a stage that is started again, a peer that is given up, a request that
fails. The status is 1 if there was one.
"""

import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from benchmarks.arguments import make_parser
from benchmarks.contention import neighbours
from benchmarks.report import console, print_table, run
from benchmarks.server import serving
from headrace.server.launch.local_server import LocalServer

MODEL = "stub:layers=8,us_per_token=200"
TIMEOUT_S = 300.0
COUNTED = ("peers_gone_total", "stage_silences_total", "scheduler_paused_seconds_total")


class Clients:
    """Send prompts until they are told to stop, and count the answers by status."""

    def __init__(self, server: LocalServer) -> None:
        self.answers: Counter[str] = Counter()
        self.errors: list[str] = []
        self.unready: Counter[str] = Counter()
        self._server = server
        self._stop = threading.Event()

    def run(self, number: int) -> None:
        """One client."""
        asked = 0
        while not self._stop.is_set():
            asked += 1
            body = {"prompt": f"{number} {asked} " + "the machine is busy " * 40, "max_tokens": 16, "temperature": 0}
            try:
                answer = self._server.request("POST", "/v1/completions", body, timeout_s=TIMEOUT_S)
            except httpx.HTTPError as error:
                self._failed(type(error).__name__, str(error))
                continue
            self.answers[str(answer.status_code)] += 1
            if answer.status_code != 200:
                self._failed("", answer.text)

    def watch(self, server: LocalServer) -> None:
        """Note what /health and /ready say once a second."""
        while not self._stop.wait(1.0):
            for path in ("/health", "/ready"):
                try:
                    answer = server.request("GET", path, timeout_s=TIMEOUT_S)
                except httpx.HTTPError as error:
                    self.unready[f"{path}: {type(error).__name__}"] += 1
                    continue
                if answer.status_code != 200:
                    self.unready[f"{path}: {re.sub('[0-9.]+', 'N', answer.json()['error']['message'])}"] += 1

    def stop(self) -> None:
        """End all of them after their current request."""
        self._stop.set()

    def _failed(self, kind: str, text: str) -> None:
        if kind:
            self.answers[kind] += 1
        self.errors.append(text[:300])


def main(arguments: Sequence[str]) -> int:
    """Print what happened. Returns 1 if anything was taken for dead."""
    parser = make_parser("overload", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--busy", type=int, default=16, metavar="N", help="processes that compute beside the servers")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--peer-timeout", type=float, default=3.0, metavar="SECONDS")
    given = parser.parse_args(arguments)
    flags = ("--model", MODEL, "--max-model-len", "4096", "--peer-timeout", f"{given.peer_timeout:g}")
    with (
        serving("--role", "prefill", "--pp", "2", *flags) as prefill,
        serving("--role", "decode", "--prefill", prefill.url, *flags) as decode,
    ):
        servers = {"prefill": prefill, "decode": decode}
        started = {name: _processes(server) for name, server in servers.items()}
        clients = Clients(decode)
        with neighbours(given.busy), ThreadPoolExecutor(given.clients + 2) as pool:
            working = [pool.submit(clients.run, number) for number in range(given.clients)]
            working += [pool.submit(clients.watch, server) for server in (prefill, decode)]
            with console.status(f"{given.busy} busy processes"):
                time.sleep(60 * given.minutes)
            clients.stop()
            for each in working:
                each.result()
        replaced = {name: len(started[name] - _processes(server)) for name, server in servers.items()}
        counted = [(name, _total(prefill, name), _total(decode, name)) for name in COUNTED]
    failed = sum(count for status, count in clients.answers.items() if status != "200")
    unhealthy = sum(seconds for what, seconds in clients.unready.items() if what.startswith("/health"))
    dead = failed + unhealthy + sum(replaced.values()) + int(sum(counted[0][1:]))
    print_table(
        f"{given.minutes:g} min with {given.busy} busy processes and {given.clients} clients, "
        f"--peer-timeout {given.peer_timeout:g}",
        ("", "prefill", "decode"),
        [
            ("processes that were replaced", f"{replaced['prefill']}", f"{replaced['decode']}"),
            *((name, f"{one:g}", f"{other:g}") for name, one, other in counted),
        ],
    )
    print(f"answers by status: {dict(clients.answers)}; not ready or unhealthy, in seconds: {dict(clients.unready)}")
    for text in clients.errors[:10]:
        print(f"  {text}")
    print(f"false deaths: {dead}")
    return 1 if dead else 0


def _processes(server: LocalServer) -> set[int]:
    """The child processes of a server."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True, check=False
    )
    return {int(pid) for pid in listed.stdout.split()}


def _total(server: LocalServer, name: str) -> float:
    """A metric over all its labels."""
    text = server.request("GET", "/metrics").text
    return sum(float(value) for value in re.findall(rf"^headrace_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


if __name__ == "__main__":
    run(main)
