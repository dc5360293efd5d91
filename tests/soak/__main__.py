"""Random schedules of the scheduler and of the transfer protocol: `python -m tests.soak --hours 8 --processes 2`.

Stops at the end of the time, after --schedules, at Ctrl-C or SIGTERM, and writes a report. Ends with 1 if something was
broken. With --recorded every scheduler is recorded, and its calls are made again from a random one on, and in some
schedules from the first.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

import msgspec

from tests.soak.cases import Case, from_json, run_case
from tests.soak.replays import run_recorded
from tests.soak.report import failure_text, report_text
from tests.soak.run import soak
from tests.soak.worker import examine


def main() -> int:
    args = _parser().parse_args()
    if args.only is not None:
        return _only(args.only, args.shrink, args.recorded)
    summary = soak(
        3600 * args.hours,
        args.processes,
        args.first_seed,
        args.schedules,
        what="replays" if args.recorded else "schedules" if args.no_coverage else "transitions",
        progress=lambda line: print(line, flush=True),
        failed=lambda failure: print(failure_text(failure), flush=True),
    )
    command = "python -m tests.soak " + shlex.join(sys.argv[1:])
    args.report.write_text(report_text(summary, command), encoding="utf-8")
    print(summary.progress())
    for text in summary.lost:
        print(text)
    print(f"report: {args.report}")
    return 0 if summary.clean else 1


def _only(case: Case, shrinks: bool, recorded: bool) -> int:
    """Run one schedule."""
    result = run_recorded(case) if recorded else run_case(case)
    for problem in result.problems:
        print(problem)
    if shrinks and result.problems:
        print(failure_text(examine(case, case.seed, result.problems, shrinks=True)))
    print("broken" if result.problems else f"kept every guarantee: {dict(result.outcomes)}")
    return 1 if result.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=_positive, default=8.0, help="stop after so long (default: %(default)s)")
    parser.add_argument("--schedules", type=int, help="stop after so many; without it only the time counts")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it (default: %(default)s)")
    parser.add_argument("--report", type=Path, default=Path("soak-report.txt"), help="default: %(default)s")
    parser.add_argument("--no-coverage", action="store_true", help="do not record transitions")
    parser.add_argument("--recorded", action="store_true", help="record the schedulers and make their calls again")
    parser.add_argument("--only", type=_case, metavar="JSON", help="run one schedule, as a failure's report names it")
    parser.add_argument("--shrink", action="store_true", help="with --only: make it simpler if it fails")
    return parser


def _case(text: str) -> Case:
    try:
        return from_json(text)
    except (ValueError, msgspec.ValidationError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError("more than 0 is needed")
    return value


if __name__ == "__main__":
    sys.exit(main())
