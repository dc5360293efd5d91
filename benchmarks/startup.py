"""From the start of a server to its first requests: `python -m benchmarks.startup`.

The time from starting the process to the first 200 of /ready, and whether the first request after that is slower than
those that follow: what has to be warmed up belongs before /ready. `--fresh` gives every start an empty cache.
"""

import argparse
import contextlib
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import console, print_table, prompt, run, spread
from headrace.server.launch.local_server import LocalServer

POLL_S = 0.02
LATER = 5


def seconds_to_ready(server: LocalServer, started: float) -> float:
    while server.process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        with contextlib.suppress(OSError):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return time.perf_counter() - started
        connection.close()
        time.sleep(POLL_S)
    raise SystemExit(f"the server ended before it was ready:\n{server.log}")


def milliseconds(server: LocalServer, ids: list[int]) -> float:
    """HTTP to first token; the KV goes nowhere."""
    started = time.perf_counter()
    body = {"prompt_token_ids": ids, "handoff": "none", "temperature": 0, "max_tokens": 1}
    answer = server.request("POST", "/v1/prefill", body)
    assert answer.status_code == 200, answer.text
    return 1000 * (time.perf_counter() - started)


def megabytes(process: int) -> float:
    """Resident memory."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def start_once(flags: Sequence[str], tokens: int) -> tuple[float, float, float, float]:
    """Seconds to ready, milliseconds of the first request and of later ones, megabytes of the front end."""
    started = time.perf_counter()
    server = LocalServer(*flags)
    try:
        ready = seconds_to_ready(server, started)
        first = milliseconds(server, prompt(tokens, 0))
        later = statistics.median(milliseconds(server, prompt(tokens, seed)) for seed in range(1, 1 + LATER))
        return ready, first, later, megabytes(server.process.pid)
    finally:
        server.end()
        server.close()


def help_seconds() -> float:
    """How long the command takes to say what it can do."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "headrace.server.cli", "serve", "--help"], stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of the requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="start without what earlier starts have kept")
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads))
    starts = []
    with console.status("starting servers"):
        if not given.fresh:
            start_once(flags, given.tokens)
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as empty:
                cache = ("--cache-dir", empty) if given.fresh else ()
                starts.append(start_once((*flags, *cache), given.tokens))
        helps = [help_seconds() for _ in range(given.rounds)]
    ready, first, later, memory = (list(column) for column in zip(*starts, strict=True))
    ratio = statistics.median(a / b for a, b in zip(first, later, strict=True))
    print_table(
        f"{given.model}, {given.dtype}, {given.threads} threads: median (range) of {given.rounds} starts",
        ("", "value"),
        [
            ("start to ready, s", spread(ready)),
            (f"first request of {given.tokens} tokens, ms", spread(first)),
            ("later ones, ms", spread(later)),
            ("first to later", f"{ratio:.2f}"),
            ("memory of the front end, MB", spread(memory)),
            ("headrace serve --help, s", f"{statistics.median(helps):.2f}"),
        ],
    )
    return 0


if __name__ == "__main__":
    run(main)
