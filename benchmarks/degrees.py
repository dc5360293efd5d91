"""Degrees of parallelism on the CPU: tokens/s of servers with two ranks of one thread beside one rank of two threads.

`python -m benchmarks.degrees`. The servers run side by side and take turns; while one computes, the others are idle. On
one machine they share its cores, so what is seen is the cost of each way, not what more machines bring.
"""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.arguments import add_model, add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_all_seconds, prefill_seconds, serving
from headrace.server.launch.local_server import LocalServer

WAYS = {
    "one rank": ("--threads", "2"),
    "--tp 2": ("--tp", "2", "--threads", "1"),
    "--pp 2": ("--pp", "2", "--threads", "1"),
    "--dp 2": ("--dp", "2", "--threads", "1"),
}
CONCURRENT, EACH = 32, 256  # prompts at once, and their tokens
Load = tuple[str, int, Callable[[LocalServer, int], float]]  # name, tokens, seconds for a seed


def single(length: int) -> Load:
    """One prompt."""
    return f"{length:,}", length, lambda server, seed: prefill_seconds(server, prompt(length, seed))


def together(count: int, length: int) -> Load:
    """Several prompts at once."""

    def seconds(server: LocalServer, seed: int) -> float:
        return prefill_all_seconds(server, [prompt(length, seed * count + number) for number in range(count)])

    return f"{count} x {length}", count * length, seconds


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("degrees", __doc__)
    add_model(parser)
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--no-prefix-cache",
             "--kv-pages", "1024", "--max-model-len", "4096")  # fmt: skip
    rows = []
    with ExitStack() as stack:
        servers = {way: stack.enter_context(serving(*flags, *own)) for way, own in WAYS.items()}
        for name, tokens, seconds in (single(128), single(512), single(2048), together(CONCURRENT, EACH)):
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            with console.status(name):
                for seed in range(given.rounds + 1):
                    for way, server in servers.items():
                        rates[way].append(tokens / seconds(server, seed))
            alone, *others = (of_way[1:] for of_way in rates.values())  # the first round warms up
            ratios = [
                statistics.median(mine / whole for mine, whole in zip(each, alone, strict=True)) for each in others
            ]
            rows.append((name, spread(alone), *(f"{ratio:.2f}" for ratio in ratios)))
    print_table(
        f"{given.model}, {given.dtype}: tokens/s of one rank with two threads, and of two ranks with one thread beside "
        f"it; median (range) of {given.rounds} rounds",
        ("tokens", *WAYS),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
