"""Prefill tokens/s of several pipeline stages of one thread each, beside one stage with as many threads.

`python -m benchmarks.stages` starts both servers. Each round times the one, then the other, on the same random prompts,
from the first request to the last first token; while one computes, the other is idle.
"""

import statistics
from collections.abc import Sequence

from benchmarks.arguments import add_model, add_rounds, make_parser
from benchmarks.report import console, print_table, prompt, run, spread
from benchmarks.server import prefill_all_seconds, serving
from headrace.server.launch.local_server import LocalServer

LOADS = ((8, 2000), (1, 8000))  # prompts at once, tokens each
WARM_UP = 600  # tokens


def measure(servers: Sequence[LocalServer], count: int, length: int, rounds: int) -> tuple[str, ...]:
    """A row of the table: rates of both servers, and the median of their ratios. count: prompts at once."""
    times = []
    for round_number in range(rounds):
        prompts = [prompt(length, round_number * count + number) for number in range(count)]
        times.append([prefill_all_seconds(server, prompts) for server in servers])
    ratio = statistics.median(one / many for many, one in times)
    rates = [[count * length / taken for taken in of_server] for of_server in zip(*times, strict=True)]
    return (f"{count} x {length:,}", *(spread(rate) for rate in rates), f"{ratio:.2f}")


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises ServerFailed."""
    parser = make_parser("stages", __doc__)
    add_model(parser)
    parser.add_argument(
        "--stages", type=int, default=2, metavar="N", help="stages of the first server, threads of the second one"
    )
    parser.add_argument("--chunk-tokens", type=int, default=512, metavar="TOKENS", help="tokens of a chunk")
    add_rounds(parser, 3)
    given = parser.parse_args(arguments)
    flags = ("--role", "prefill", "--model", given.model, "--dtype", given.dtype, "--no-prefix-cache",
             "--chunk-tokens", str(given.chunk_tokens))  # fmt: skip
    rows = []
    with (
        serving(*flags, "--pp", str(given.stages), "--threads", "1") as pipeline,
        serving(*flags, "--pp", "1", "--threads", str(given.stages)) as single,
    ):
        for count, length in LOADS:
            with console.status(f"{count} x {length} tokens"):
                for server in (pipeline, single):
                    prefill_all_seconds(server, [prompt(WARM_UP, length)])
                rows.append(measure((pipeline, single), count, length, given.rounds))
    print_table(
        f"prefill tokens/s, {given.dtype}, chunks of {given.chunk_tokens}: median (range) of {given.rounds} rounds",
        ("prompts", f"{given.stages} stages, 1 thread each", f"1 stage, {given.stages} threads", "ratio"),
        rows,
    )
    return 0


if __name__ == "__main__":
    run(main)
