"""What measuring commands print, write and draw: files, tables, quantiles, a line of progress, pictures."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_output(option: str, text: str | None, suffix: str = "") -> Path | None:
    """A file that can be written later. Raises ConfigError."""
    if text is None:
        return None
    path = Path(text)
    if suffix and path.suffix.lower() != suffix:
        raise ConfigError(f"{option}: expected a file name that ends in {suffix}, got {text!r}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{option}: {path} {'is a folder' if path.is_dir() else 'is in no folder that exists'}")
    return path


def write_json(path: Path | None, report: msgspec.Struct) -> None:
    """Write all figures of a report, indented; None writes nothing. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def check_plotting(path: Path | None) -> None:
    """Raises ConfigError where a picture is asked for and matplotlib is missing."""
    if path is not None and find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'headrace[plot]'")


def new_figure(width: float, height: float) -> "Figure":
    """An empty picture; inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture as a PNG. Raises ConfigError for a file that cannot be written."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def table(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Right-aligned columns; the first of them, left in number, are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share of ordered values lies, interpolated; None of no values."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


class ProgressLine:
    """One line on a terminal, nothing where the stream is none."""

    def __init__(self, stream: TextIO, clock: Clock, least_s: float) -> None:
        """least_s: between two updates, each of which takes time from what is measured."""
        self._stream = stream
        self._shown = stream.isatty()
        self._clock = clock
        self._least_s = least_s
        self._next_at = 0.0

    def show(self, text: str, *, at_once: bool = False) -> None:
        """Replace the line, unless that was done a moment ago."""
        if self._shown and (at_once or self._clock.now() >= self._next_at):
            self._next_at = self._clock.now() + self._least_s
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
