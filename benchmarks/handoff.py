"""What handing over costs: time to first token through a decode peer against `fake` (KV goes nowhere).

`python -m benchmarks.handoff`. One prefill server, one decode server, each request alone; the two ways take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import httpx

from benchmarks.report import console, print_table, prompt, run, spread
from headrace.server.launch.local_server import LocalServer


def through_peer(decode: LocalServer, ids: list[int]) -> float:
    """Milliseconds from the request to the first token of the decode server's stream."""
    body = {"prompt": ids, "max_tokens": 2, "temperature": 0, "stream": True, "ignore_eos": True}
    first: float | None = None
    started = time.perf_counter()
    with httpx.stream("POST", f"{decode.url}/v1/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():  # to the end, so that nothing of it runs into the next measurement
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                first = first or 1000 * (time.perf_counter() - started)
    assert first is not None, "the stream ended without a token"
    return first


def to_nobody(prefill: LocalServer, ids: list[int]) -> float:
    """Milliseconds from the request to the answer with the first token."""
    body = {"prompt_token_ids": ids, "handoff": "none", "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    started = time.perf_counter()
    answer = prefill.request("POST", "/v1/prefill", body)
    assert answer.status_code == 200, answer.text
    return 1000 * (time.perf_counter() - started)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    given = parser.parse_args(arguments)
    flags = ("--model", given.model, "--dtype", given.dtype, "--no-prefix-cache")
    prefill = LocalServer("--role", "prefill", *flags)
    servers = [prefill]
    try:
        with console.status("starting a prefill and a decode server"):
            prefill.wait_ready()
            decode = LocalServer("--role", "decode", "--prefill", prefill.url, *flags)
            servers.insert(0, decode)
            decode.wait_ready()
        rows = []
        for length in given.lengths:
            with console.status(f"{length} tokens"):
                through_peer(decode, prompt(64, 0))
                to_nobody(prefill, prompt(64, 1))
                pairs = [
                    (through_peer(decode, prompt(length, 2 * seed)), to_nobody(prefill, prompt(length, 2 * seed + 1)))
                    for seed in range(1, 1 + given.rounds)
                ]
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append((f"{length:,}", spread([a for a, _ in pairs]), spread([b for _, b in pairs]), f"{ratio:.3f}"))
    finally:
        for server in servers:
            server.end()
            server.close()
    print_table(
        f"time to first token, ms, {given.dtype}: median (range) of {given.rounds} rounds",
        ("tokens", "through a decode peer", "fake", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
