"""Seconds from starting a server to /ready, ms of its first request beside later ones, and memory of the front end.

`python -m benchmarks.startup`. A first request slower than later ones would show that warm-up is missing before /ready.
`--fresh` gives every start an empty cache.
"""

import contextlib
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.arguments import add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds
from headrace.server.launch.local_server import LocalServer

POLL_S = 0.02
LATER = 5  # requests after the first one


def seconds_to_ready(server: LocalServer, started: float) -> float:
    """Seconds from started to the first 200 of /ready. Raises SystemExit, with the log, when the server ends before."""
    while server.process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        with contextlib.suppress(OSError):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return time.perf_counter() - started
        connection.close()
        time.sleep(POLL_S)
    raise SystemExit(f"the server ended before it was ready:\n{server.log}")


def megabytes(process: int) -> float:
    """Resident memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def start_once(flags: Sequence[str], tokens: int) -> tuple[float, float, float, float]:
    """Seconds to ready, milliseconds of the first request and of later ones, megabytes of the front end."""
    started = time.perf_counter()
    server = LocalServer(*flags)
    try:
        ready = seconds_to_ready(server, started)
        first = 1000 * prefill_seconds(server, prompt(tokens, 0))
        later = 1000 * statistics.median(prefill_seconds(server, prompt(tokens, seed)) for seed in range(1, 1 + LATER))
        return ready, first, later, megabytes(server.process.pid)
    finally:
        server.end()
        server.close()


def help_seconds() -> float:
    """Seconds of `headrace serve --help`."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "headrace.cli.commands", "serve", "--help"], stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - started


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ServerFailed."""
    parser = make_parser("startup", __doc__)
    add_model(parser)
    add_threads(parser)
    parser.add_argument("--tokens", type=int, default=128, metavar="TOKENS", help="tokens of each request")
    add_rounds(parser, 5)
    parser.add_argument("--fresh", action="store_true", help="start every server with an empty cache directory")
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
