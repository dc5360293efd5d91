"""Degrees of parallelism on the CPU: tokens/s of servers with two ranks of one thread beside one rank of two threads.

`python -m benchmarks.degrees`. The servers run side by side and take turns; while one computes, the others are idle. On
one machine they share its cores, so what is seen is the cost of each way, not what more machines bring.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from benchmarks.arguments import add_model, add_rounds, make_parser
from benchmarks.peers import Compute
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_all_seconds, serving

VOCABULARY = 2000  # ids below this are in every model's vocabulary
WAYS = {
    "one rank": ("--threads", "2"),
    "--tp 2": ("--tp", "2", "--threads", "1"),
    "--pp 2": ("--pp", "2", "--threads", "1"),
    "--dp 2": ("--dp", "2", "--threads", "1"),
}
LOADS: dict[str, tuple[int, ...]] = {"128": (128,), "512": (512,), "2048": (2048,), "32x256": (256,) * 32}


def rates_of(sides: Mapping[str, Compute], load: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """tokens/s of each side for prompts at once of so many tokens: side by side in each round, after one to warm up."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        prompts = [prompt(length, 1000 * number + index, VOCABULARY) for index, length in enumerate(load)]
        for side, seconds in sides.items():
            rates[side].append(sum(load) / seconds(prompts))
    return {side: found[1:] for side, found in rates.items()}


def ratio(rates: Sequence[float], others: Sequence[float]) -> str:
    """Median of the ratios of the rounds, as text."""
    return f"{statistics.median(one / other for one, other in zip(rates, others, strict=True)):.2f}"


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ConfigError, ServerFailed."""
    parser = make_parser("degrees", __doc__)
    add_model(parser)
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS), help="sets of prompts")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--no-prefix-cache",
             "--kv-pages", "1024", "--max-model-len", "4096")  # fmt: skip
    rows = []
    with ExitStack() as stack:
        sides = {
            way: partial(prefill_all_seconds, stack.enter_context(serving(*flags, *own))) for way, own in WAYS.items()
        }
        for name in given.loads:
            with console.status(name):
                rates = rates_of(sides, LOADS[name], given.rounds)
            alone, *others = rates.values()
            rows.append((name, spread(alone), *(ratio(each, alone) for each in others)))
    print_table(
        f"{given.model}, {given.dtype}: tokens/s of one rank with two threads, and of two ranks with one thread beside "
        f"it; median (range) of {given.rounds} rounds",
        ("tokens", *WAYS),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
