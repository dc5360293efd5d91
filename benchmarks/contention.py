"""Prefill tokens/s beside busy neighbours on the same cores, and what each engine keeps of its own speed.

`python -m benchmarks.contention`, with the interpreters of other engines as in benchmarks.peers. A neighbour is a
process that computes without a pause, or one that wakes every 5 ms for 1 ms of work. Neighbours and engines have a
session each, so that they are equals where Linux gives cores to sessions (autogroups, see sched(7)). Each round goes
through all sets of neighbours, and through all engines in turns.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.arguments import make_parser
from benchmarks.peers import PAUSE_S, add_engines, engines
from benchmarks.report import console, print_table, prompt, run, spread

# Each ends with its parent, however that ends.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
WAKING = BUSY.replace("import os", "import os, time").replace(
    "sum(range(100_000))", "time.sleep(0.005), sum(range(60_000))"
)
LOADS = {"0": (), "1": (BUSY,), "2": (BUSY,) * 2, "4": (BUSY,) * 4, "waking": (WAKING,)}


@contextmanager
def neighbours(programs: Sequence[str]) -> Iterator[None]:
    """Processes that compute meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", program], start_new_session=True) for program in programs]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main(arguments: Sequence[str]) -> int:
    """Print the table. Raises what peers.engines() raises."""
    parser = make_parser("contention", __doc__)
    add_engines(parser)
    parser.add_argument("--tokens", type=int, default=512, metavar="TOKENS", help="length of the prompt")
    parser.add_argument(
        "--neighbours", nargs="+", default=["1", "2", "waking"], choices=list(LOADS), help="sets of them"
    )
    given = parser.parse_args(arguments)
    loads: list[str] = [load for load in LOADS if load == "0" or load in given.neighbours]
    with engines(given) as started:
        rates: dict[tuple[str, str], list[float]] = {(load, name): [] for load in loads for name in started}
        for number in range(given.rounds + 1):  # the first one warms up
            for place, load in enumerate(loads):
                with neighbours(LOADS[load]), console.status(f"neighbours: {load}"):
                    for name, seconds in started.items():
                        time.sleep(PAUSE_S)
                        taken = seconds([prompt(given.tokens, 1000 * number + place)])
                        if number:
                            rates[load, name].append(given.tokens / taken)
    kept = {
        key: statistics.median(one / alone for one, alone in zip(values, rates["0", key[1]], strict=True))
        for key, values in rates.items()
    }
    print_table(
        f"tokens/s of a prompt of {given.tokens}, {given.dtype}, {given.threads} threads: median (range) of "
        f"{given.rounds} rounds, and the share of the engine's speed alone",
        ("busy neighbours", *started, *(f"{name} keeps" for name in started)),
        [
            (
                load,
                *(spread(rates[load, name]) for name in started),
                *(f"{kept[load, name]:.2f}" for name in started),
            )
            for load in loads
        ],
    )
    return 0


if __name__ == "__main__":
    run(main)
