"""`make faults`: the whole fault matrix, and its table with results.

python -m tests.faults [--only WORDS] [--within SECONDS] [--write]
"""

import argparse
import sys

import pytest

from tests.faults.recorder import NAME, Recorder
from tests.faults.report import render, write

WITHIN_S = 10.0
EARLY = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")  # the matrix is, with what it needs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Run the fault matrix.")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose names match, as pytest -k has it")
    parser.add_argument(
        "--within", type=float, default=WITHIN_S, metavar="SECONDS", help="until honest requests are served again"
    )
    parser.add_argument("--write", action="store_true", help="write the results to docs/reliability.md")
    args = parser.parse_args()
    recorder = Recorder(args.within)
    flags = ["-m", "faults or not faults", "-p", "no:cacheprovider", *EARLY]
    if args.only:
        flags += ["-k", args.only]
    status = pytest.main([*flags, "tests/faults", *recorder.tests()], plugins=[_Named(recorder)])
    print(render(recorder.results))
    if args.write:
        write(recorder.results)
    return int(status)


class _Named:
    """Registers the recorder by its name."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(self._recorder, NAME)


if __name__ == "__main__":
    sys.exit(main())
