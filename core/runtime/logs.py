"""Set-up of a process's log: one line a message whatever its text is, and a bounded rate for each place that logs.

Texts of peers, clients, files and other processes get into messages and into tracebacks. Here they are made harmless:
control characters and terminal escapes are written as \\xNN, and lines of a traceback are indented, so that no text can
look like another message.
"""

import json
import logging
import sys
from collections.abc import Container
from datetime import UTC, datetime
from typing import Literal

from headrace.core.runtime.output import LOST, never_block_output, queued_output
from headrace.core.runtime.rate_limit import TokenBucket, printable

MAX_CHARS = 8192  # of a message
PER_S = 10.0  # messages of one place in the program
BURST = 100.0
INDENT = "    "


def configure_logging(
    level: str, name: str, form: Literal["text", "json"] = "text", unlimited: Container[str] = ()
) -> None:
    """Log to standard error from now on, which does not wait for a reader any more (output.py). level: least severe
    one. name: of the process, is in each message. unlimited: loggers that bound their rate by themselves."""
    never_block_output()
    handler = logging.StreamHandler()
    formatter = JsonFormatter(name) if form == "json" else LineFormatter(name)
    handler.setFormatter(formatter)
    if (output := queued_output(sys.stderr)) is not None:
        output.lost_text = lambda lines: f"{formatter.format(_warning(LOST.format(lines)))}\n"
    if level != "debug":
        handler.addFilter(RateFilter(unlimited))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LineFormatter(logging.Formatter):
    """Writes a record as one line of printable characters, and its traceback in lines that are indented."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process.replace('%', '%%')}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without the traceback."""
        return _line(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """The traceback."""
        return _indented(super().formatException(ei))  # type: ignore[arg-type]

    def formatStack(self, stack_info: str) -> str:
        """The stack of a record that asks for it."""
        return _indented(stack_info)


class JsonFormatter(logging.Formatter):
    """Writes a record as a line of JSON: time, level, process, logger, message, traceback, and its fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line; ASCII alone, so that no terminal takes a part of it for a command."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        if record.exc_info:
            line["traceback"] = _cut(self.formatException(record.exc_info))
        line |= getattr(record, "fields", {})
        return json.dumps(line, default=str)


class RateFilter(logging.Filter):
    """Lets each place in the program log BURST messages at once and PER_S a second. The next message of a place tells
    how many were left out."""

    def __init__(self, unlimited: Container[str] = ()) -> None:
        super().__init__()
        self._unlimited = unlimited
        self._places: dict[tuple[str, int], tuple[TokenBucket, list[int]]] = {}  # bounded by the size of the program

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged."""
        if record.name in self._unlimited:
            return True
        place = (record.pathname, record.lineno)
        bucket, left_out = self._places.setdefault(place, (TokenBucket(record.created, PER_S, BURST), [0]))
        if bucket.exceeded(record.created):
            left_out[0] += 1
            return False
        if left_out[0]:
            record.msg, record.args = f"{record.getMessage()} ({left_out[0]} like it were left out)", None
            left_out[0] = 0
        return True


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


def _indented(text: str) -> str:
    return "\n".join(INDENT + _line(line) for line in text.split("\n"))


def _line(text: str) -> str:
    return printable(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text)} characters)"
