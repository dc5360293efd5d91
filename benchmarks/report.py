"""Output of benchmarks, the prompts they use, and running one as a command."""

import random
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from headrace.core.types.errors import ConfigError
from headrace.server.launch.local_server import ServerFailed

console = Console()


def prompt(tokens: int, seed: int, vocabulary: int = 40_000) -> list[int]:
    """Random token ids; prompts of different seeds share no prefix, so no prefix cache helps."""
    generator = random.Random(seed)
    return [generator.randrange(100, vocabulary) for _ in range(tokens)]


def spread(values: Sequence[float]) -> str:
    """Median and range, as text."""
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is left-aligned."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def run(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a benchmark as a command; mistakes, a server that fails, and Ctrl-C end it without a traceback, and without a
    process that stays behind. SIGTERM, as of timeout(1), is the same as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except (ConfigError, ServerFailed) as error:
        sys.exit(f"{sys.argv[0]}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
