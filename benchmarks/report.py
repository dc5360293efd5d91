"""What benchmarks print, and the prompts they use."""

import random
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

console = Console()


def prompt(tokens: int, seed: int, vocabulary: int = 40_000) -> list[int]:
    """Random token ids: no two seeds share a prefix, so no cache helps."""
    generator = random.Random(seed)
    return [generator.randrange(100, vocabulary) for _ in range(tokens)]


def spread(values: Sequence[float]) -> str:
    """Median, and the range around it."""
    return f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
