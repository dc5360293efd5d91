"""The log: no text of others makes a second line or reaches the terminal, and no place floods it."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Literal

import pytest

from headrace.core.runtime import logs

FORGED = "p\n2026-01-01 00:00:00,000 ERROR scheduler: all is lost\x1b[2J\r\u2028\x9b\u202e"


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger whose handler is set up as configure_logging() does it, and what it writes."""
    with configured("text") as found:
        yield found


@contextmanager
def configured(form: Literal["text", "json"]) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    root, written = logging.getLogger(), io.StringIO()
    before, level = root.handlers[:], root.level
    root.handlers[:] = []
    logs.configure_logging("info", "rank 1 (50%)", form)
    [handler] = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(written)
    yield logging.getLogger("anything"), written
    root.handlers[:] = before
    root.setLevel(level)


def test_a_message_is_one_printable_line(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("hello from %s", FORGED)
    [line] = written.getvalue().splitlines()
    assert line.isprintable()
    assert " WARNING rank 1 (50%): hello from p\\x0a2026" in line
    assert "\\x1b[2J" in line


def test_a_traceback_cannot_look_like_messages(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    try:
        raise ValueError(FORGED)
    except ValueError:
        logger.exception("it failed")
    first, *others = written.getvalue().removesuffix("\n").split("\n")
    assert first.endswith("it failed")
    assert all(line.isprintable() and line.startswith(logs.INDENT) for line in others)


def test_lines_of_json_have_the_fields_of_a_record_and_no_control_characters() -> None:
    with configured("json") as (logger, written):
        logger.warning("hello from %s", FORGED, extra={"fields": {"rid": FORGED, "prompt": 7}})
        try:
            raise ValueError(FORGED)
        except ValueError:
            logger.exception("it failed")
    first, second = written.getvalue().splitlines()
    assert (first + second).isascii()
    assert (first + second).isprintable()
    line = json.loads(first)
    assert line["message"] == f"hello from {FORGED}"
    assert (line["level"], line["process"], line["logger"]) == ("warning", "rank 1 (50%)", "anything")
    assert (line["rid"], line["prompt"]) == (FORGED, 7)
    assert datetime.fromisoformat(line["time"]).tzinfo is not None
    assert "ValueError" in json.loads(second)["traceback"]


def test_a_long_message_is_cut(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    logger.warning("%s", "x" * 1_000_000)
    assert len(written.getvalue()) < 2 * logs.MAX_CHARS


def test_one_place_has_a_rate_and_others_their_own() -> None:
    limit = logs.RateFilter()

    def passes(line: int, now: float) -> bool:
        record = logging.LogRecord("a", logging.ERROR, "file.py", line, "refused %s", ("x",), None)
        record.created = now
        if not limit.filter(record):
            return False
        texts.append(record.getMessage())
        return True

    texts: list[str] = []
    assert sum(passes(1, 5.0) for _ in range(10_000)) == logs.BURST
    assert passes(2, 5.0), "another place"
    assert passes(1, 6.0)
    assert texts[-1] == "refused x (9900 like it were left out)"
    assert 90 <= sum(passes(1, 6.0 + second) for second in range(1, 11) for _ in range(1000)) <= 10 * logs.PER_S
    assert not all(passes(1, 1.0) for _ in range(1000)), "a clock that was set back"
    assert passes(1, 4.0), "and it goes on"


def test_a_logger_that_bounds_its_rate_itself_is_left_alone() -> None:
    limit = logs.RateFilter(unlimited={"requests"})
    record = logging.LogRecord("requests", logging.INFO, "file.py", 1, "one more", (), None)
    assert all(limit.filter(record) for _ in range(10_000))
