"""A baked prefix: time to the first token from a KV file in a folder, in a static file server, from disk, or computed.

`python -m benchmarks.kv_library`. Bakes one prefix for each round, starts one server for each way, and asks them in
turns, so that no prefix is in a pool before. All files are in the memory of the system. The file server is
`python -m http.server`, which knows no ranges; a second one answers them.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from benchmarks.arguments import add_model, add_rounds, add_threads, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_seconds, serving
from headrace.core.runtime.process import module_command
from headrace.server.launch.free_port import free_port
from headrace.server.launch.local_server import LocalServer

PAGE = 16
TAIL = 32  # tokens behind the prefix, which are computed in any case
SETTLE_S = 3.0


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves files, and the one range that is asked for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with the range, or with the file."""
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        path = Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            super().do_GET()
            return
        first, last = map(int, asked.split("-"))
        size = path.stat().st_size
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        with path.open("rb") as file:
            file.seek(first)
            left = last + 1 - first
            while left and (part := file.read(min(left, 1 << 20))):
                self.wfile.write(part)
                left -= len(part)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def range_server(folder: Path) -> Iterator[str]:
    """The URL of a folder in a static file server that answers ranges."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(RangeHandler, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def plain_server(folder: Path) -> Iterator[str]:
    """The same of Python's own, without ranges."""
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def bake(folder: Path, prefixes: Sequence[Sequence[int]], flags: Sequence[str]) -> float:
    """Write a file for each prefix. Returns the MB of one."""
    for number, prefix in enumerate(prefixes):
        ids = folder / f"{number}.json"
        ids.write_bytes(msgspec.json.encode(prefix))
        out = folder / f"{number}.kv"
        command = module_command("headrace.cli.commands", "bake", "--token-ids", str(ids), "-o", str(out), *flags)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(module_command("headrace.cli.commands", "bake", "--index", str(folder)), check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    return (folder / "0.kv").stat().st_size / 1e6


def load_rate(server: LocalServer) -> str:
    """MB/s of the copy thread that loaded KV files, verifying included."""
    found = {}
    for line in server.request("GET", "/metrics").text.splitlines():
        for what in ("bytes", "seconds"):
            if line.startswith(f"headrace_stage_tier_{what}_total") and '"library"' in line and '"load"' in line:
                found[what] = float(line.rpartition(" ")[2])
    return f"{found['bytes'] / found['seconds'] / 1e6:,.0f}" if found.get("seconds") else ""


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError for an unknown model, ServerFailed."""
    parser = make_parser("kv_library", __doc__)
    add_model(parser)
    add_threads(parser)
    add_rounds(parser, 3)
    parser.add_argument("--tokens", type=int, default=4000, help="of a prefix (default: 4000)")
    given = parser.parse_args(arguments)
    shared = ("--model", given.model, "--dtype", given.dtype, "--threads", str(given.threads), "--page-size", str(PAGE))
    flags = ("--role", "prefill", *shared, "--kv-pages", "2048", "--disk-admission-turn", "0")
    prefixes = [prompt(given.tokens // PAGE * PAGE, 1 + round) for round in range(given.rounds)]
    asked = [[*prefix, *prompt(TAIL, 100 + round)] for round, prefix in enumerate(prefixes)]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, disk = Path(name, "library"), Path(name, "disk")
        folder.mkdir()
        with console.status("baking"):
            size = bake(folder, prefixes, shared)
        with serving(*flags, "--disk-path", str(disk)) as filling, console.status("filling the disk tier"):
            for ids in asked:
                prefill_seconds(filling, ids)
            time.sleep(SETTLE_S)
        ways = {
            "computed": (),
            "disk tier": ("--disk-path", str(disk)),
            "KV file in a folder": ("--kv-library", str(folder)),
            "KV file by HTTP": ("--kv-library", stack.enter_context(plain_server(folder))),
            "KV file by HTTP with ranges": ("--kv-library", stack.enter_context(range_server(folder))),
        }
        servers = {way: stack.enter_context(serving(*flags, *more)) for way, more in ways.items()}
        for server in servers.values():
            prefill_seconds(server, prompt(64, 0))
        time.sleep(SETTLE_S)
        for ids in asked:
            for way, server in servers.items():
                with console.status(way):
                    times.setdefault(way, []).append(1000 * prefill_seconds(server, ids))
        rates = {way: load_rate(server) for way, server in servers.items()}
    base = times["computed"]
    rows = [
        (way, spread(taken), f"{statistics.median(a / b for a, b in zip(taken, base, strict=True)):.3f}", rates[way])
        for way, taken in times.items()
    ]
    print_table(
        f"{given.tokens:,} tokens, {given.dtype}, {given.threads} threads, {size:.0f} MB a file: time to first token, "
        f"median (range) of {given.rounds} rounds in turns",
        ("prefix", "ms", "of computing", "MB/s loaded"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
