"""Random schedules on a bad network until the time is up: `python -m tests.soak --minutes 30 --seed 100000`."""

import argparse
import sys
import time
from collections import Counter

from tests.transfer.schedules import run_schedule


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run random transfer schedules; stop at the first that breaks a guarantee."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1000, help="of the first schedule; the others follow it")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    ends: Counter[str] = Counter()
    seed = args.seed
    while time.monotonic() < end:
        try:
            ends.update(run_schedule(seed))
        except AssertionError as error:
            print(f"\nseed {seed}: {error}", file=sys.stderr)
            return 1
        seed += 1
        if seed % 100 == 0 and sys.stdout.isatty():
            print(f"\r{seed - args.seed} schedules, {dict(ends)}", end="", flush=True)
    print(f"\r{seed - args.seed} schedules from seed {args.seed} kept the guarantees; fetches by end: {dict(ends)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
