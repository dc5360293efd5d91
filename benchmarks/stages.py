"""A model over two stages of one thread each beside one stage of two threads: `python -m benchmarks.stages`.

Both servers are up, and each round times the one, then the other, on the same random prompts; while one computes, the
other is idle. Seconds from the first request to the last first token, the KV goes nowhere.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.prefill import server_prefill
from benchmarks.report import console, print_table, prompt, run, spread
from headrace.server.launch.local_server import LocalServer

LOADS = ((8, 2000), (1, 8000))  # prompts at once, tokens each
WARM_UP = 600


def seconds(server: LocalServer, prompts: Sequence[list[int]]) -> float:
    """All of them at once."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(server_prefill(server), prompts))
    return time.perf_counter() - started


def measure(servers: Sequence[LocalServer], count: int, length: int, rounds: int) -> tuple[str, ...]:
    """A row of the table: many stages, one stage, and the median of the ratios of their rates."""
    times = []
    for round_number in range(rounds):
        prompts = [prompt(length, round_number * count + number) for number in range(count)]
        times.append([seconds(server, prompts) for server in servers])
    ratio = statistics.median(one / many for many, one in times)
    rates = [[count * length / taken for taken in of_server] for of_server in zip(*times, strict=True)]
    return (f"{count} x {length:,}", *(spread(rate) for rate in rates), f"{ratio:.2f}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--stages", type=int, default=2, help="stages of one thread; the other server has as many threads"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--no-prefix-cache",
             "--chunk-tokens", str(given.chunk_tokens))  # fmt: skip
    shapes = (("--pp", str(given.stages), "--threads", "1"), ("--pp", "1", "--threads", str(given.stages)))
    servers = [LocalServer(*flags, *shape) for shape in shapes]
    try:
        with console.status("starting two prefill servers"):
            for server in servers:
                server.wait_ready()
        rows = []
        for count, length in LOADS:
            with console.status(f"{count} x {length} tokens"):
                for server in servers:
                    seconds(server, [prompt(WARM_UP, length)])
                rows.append(measure(servers, count, length, given.rounds))
    finally:
        for server in servers:
            server.end()
            server.close()
    print_table(
        f"prefill tokens/s, {given.dtype}, chunks of {given.chunk_tokens}: median (range) of {given.rounds} rounds",
        ("prompts", f"{given.stages} stages, 1 thread each", f"1 stage, {given.stages} threads", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
