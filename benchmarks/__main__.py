"""Prefill tokens/s, handoff latency and transfer GB/s, with default settings: `python -m benchmarks`."""

from collections.abc import Sequence

from benchmarks import handoff, prefill, transfer
from benchmarks.report import run


def main(_arguments: Sequence[str]) -> int:
    """Run the three benchmarks one after the other."""
    for benchmark in (prefill, handoff, transfer):
        benchmark.main([])
    return 0


if __name__ == "__main__":
    run(main)
