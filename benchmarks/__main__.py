"""All benchmarks in turn: `python -m benchmarks`."""

import sys
from collections.abc import Sequence

from benchmarks import handoff, prefill, transfer


def main(_arguments: Sequence[str] = ()) -> int:
    for benchmark in (prefill, handoff, transfer):
        benchmark.main([])
    return 0


if __name__ == "__main__":
    sys.exit(main())
