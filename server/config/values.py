"""Parses and checks the value of one setting, from a flag (text) or a TOML file (typed)."""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

from headrace.core.types.errors import ConfigError
from headrace.server.config.settings import Kind, Setting

_SIZE = re.compile(r"(\d+)\s*(b|kib|mib|gib|kb|mb|gb)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_EXPECTED: dict[Kind, str] = {
    "text": "a text",
    "integer": "a whole number",
    "size": 'a number of bytes such as 65536 or "64MiB"',
    "number": "a number of seconds",
    "switch": "true or false",
    "list": "a text or a list of texts",
    "integers": "whole numbers separated by commas",
    "choice": "a text",
    "choices": "names separated by commas",
}


def parse_value(setting: Setting, given: object, origin: str) -> Any:
    """Returns the field's value. origin names the flag or file at the beginning of an error message.

    Raises ConfigError for a wrong type, an unknown choice or a number out of bounds.
    """
    try:
        value = _PARSERS[setting.kind](given)
    except ValueError:
        shown = "the given text" if setting.flag.secret else repr(given)
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {shown}") from None
    named = value if isinstance(value, tuple) else (value,)
    unknown = [name for name in named if setting.choices and name not in setting.choices]
    if unknown:
        hint = nearest(str(unknown[0]), setting.choices)
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {given!r}{hint}")
    low, high = setting.flag.low, setting.flag.high
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {given!r}")
    return value


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint with the known name closest to a misspelled one; empty when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _expected(setting: Setting) -> str:
    if setting.choices:
        return ("names out of " if setting.kind == "choices" else "one of ") + ", ".join(setting.choices)
    words, low, high = _EXPECTED[setting.kind], setting.flag.low, setting.flag.high
    if setting.flag.unit in ("share", "factor"):
        words = "a number"
    if low is not None and high is not None:
        return f"{words} from {low:g} to {high:g}"
    return words if low is None else f"{words}, at least {low:g}"


def _text(given: object) -> str:
    if not isinstance(given, str) or not given.strip():
        raise ValueError(given)
    return given.strip()


def _integer(given: object) -> int:
    if isinstance(given, bool) or not isinstance(given, int | str):
        raise ValueError(given)
    return int(given)


def _number(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise ValueError(given)
    value = float(given)
    if not math.isfinite(value):
        raise ValueError(given)
    return value


def _size(given: object) -> int:
    if isinstance(given, str):
        match = _SIZE.fullmatch(given.strip())
        if match is None:
            raise ValueError(given)
        return int(match[1]) * _UNITS[(match[2] or "").lower()]
    return _integer(given)


def _switch(given: object) -> bool:
    if isinstance(given, bool):
        return given
    raise ValueError(given)


def _list(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (_text(given),)
    if not isinstance(given, list | tuple):
        raise ValueError(given)
    return tuple(_text(item) for item in given)


def _integers(given: object) -> tuple[int, ...]:
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given, list | tuple):
        raise ValueError(given)
    return tuple(_integer(item) for item in given)


def _choices(given: object) -> tuple[str, ...]:
    names = _list(given.split(",") if isinstance(given, str) else given)
    if not names or len(set(names)) != len(names):
        raise ValueError(given)
    return names


_PARSERS: dict[Kind, Callable[[object], Any]] = {
    "text": _text,
    "choice": _text,
    "integer": _integer,
    "number": _number,
    "size": _size,
    "switch": _switch,
    "list": _list,
    "integers": _integers,
    "choices": _choices,
}
