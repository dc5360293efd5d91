"""Configuration: defaults, then a TOML file, then the environment's keys, then flags, into
headrace.core.config.Config."""

import argparse
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import (
    Config,
    EngineConfig,
    GroupConfig,
    KvEventsConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    TransferConfig,
)
from headrace.core.types.errors import ConfigError
from headrace.server.config.consistency import check
from headrace.server.config.settings import BY_KEY, SETTINGS, Kind, Setting

API_KEY_VARIABLE = "HEADRACE_API_KEY"
PREFILL_API_KEY_VARIABLE = "HEADRACE_PREFILL_API_KEY"
STAGE_KEY_VARIABLE = "HEADRACE_STAGE_KEY"
_SIZE = re.compile(r"(\d+)\s*(b|kib|mib|gib|kb|mb|gb)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give the parser --config and one flag per setting. A flag that is not given leaves no attribute behind."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of the keys below (without the dashes)")
    defaults = Config()
    for setting in SETTINGS:
        dest = setting.key
        if setting.kind == "switch":
            parser.add_argument(
                setting.flag,
                dest=dest,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=_flag_help(setting, defaults),
            )
        else:
            parser.add_argument(
                setting.flag,
                dest=dest,
                action="append" if setting.kind == "list" else "store",
                default=argparse.SUPPRESS,
                metavar=_METAVARS.get(setting.kind) or "{" + ",".join(setting.choices) + "}",
                help=_flag_help(setting, defaults),
            )


_METAVARS: dict[Kind, str] = {
    "text": "TEXT",
    "integer": "N",
    "size": "BYTES",
    "number": "SECONDS",
    "list": "TEXT",
    "integers": "N,N,...",
    "choices": "NAME,NAME,...",
}


def _flag_help(setting: Setting, defaults: Config) -> str:
    value = setting.value(defaults)
    if value in ("", ()) or setting.secret:
        return setting.help
    if isinstance(value, bool):
        value = "on" if value else "off"
    if isinstance(value, tuple):
        value = ",".join(map(str, value))
    return f"{setting.help} (default: {value})"


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Return the configuration that flags (by key, as argparse left them) and the environment describe.

    Raises ConfigError for unknown keys, wrong types, values out of bounds and settings that contradict each other.
    """
    values: dict[str, Any] = {}
    path = flags.get("config")
    if path is not None:
        values |= _read_file(Path(path))
    if keys := environ.get(API_KEY_VARIABLE, ""):
        values["api-key"] = tuple(key.strip() for key in keys.split(",") if key.strip())
    if key := environ.get(PREFILL_API_KEY_VARIABLE, ""):
        values["prefill-api-key"] = key.strip()
    if key := environ.get(STAGE_KEY_VARIABLE, ""):
        values["stage-key"] = key.strip()
    if folder := _cache_folder(environ):
        values.setdefault("cache-dir", folder)
    for key, given in flags.items():
        if key in BY_KEY:
            values[key] = parse_value(BY_KEY[key], given, BY_KEY[key].flag)
    config = _build(values)
    check(config)
    return config


def _cache_folder(environ: Mapping[str, str]) -> str:
    """Where caches belong by the XDG base directory specification; "" for a user without a home."""
    if base := environ.get("XDG_CACHE_HOME", ""):
        return str(Path(base) / "headrace")
    home = environ.get("HOME", "")
    return str(Path(home) / ".cache" / "headrace") if home else ""


def _read_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for name, given in table.items():
        setting = BY_KEY.get(name.replace("_", "-"))
        if setting is None:
            raise ConfigError(f"{path}: unknown key {name!r}{nearest(name.replace('_', '-'), BY_KEY)}")
        values[setting.key] = parse_value(setting, given, f"{path}: {name}")
    return values


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint naming the known word closest to a wrong one, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def parse_value(setting: Setting, given: object, origin: str) -> Any:
    """Turn what a flag (text) or TOML (typed) gave into the field's value. origin begins the error message."""
    try:
        value = _PARSERS[setting.kind](given)
    except ValueError:
        shown = "the given text" if setting.secret else repr(given)
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {shown}") from None
    named = value if isinstance(value, tuple) else (value,)
    unknown = [name for name in named if setting.choices and name not in setting.choices]
    if unknown:
        hint = nearest(str(unknown[0]), setting.choices)
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {given!r}{hint}")
    low, high = setting.low, setting.high
    if (low is not None and value < low) or (high is not None and value > high):
        raise ConfigError(f"{origin}: expected {_expected(setting)}, got {given!r}")
    return value


def _expected(setting: Setting) -> str:
    if setting.choices:
        return ("names out of " if setting.kind == "choices" else "one of ") + ", ".join(setting.choices)
    words = {
        "text": "a text",
        "integer": "a whole number",
        "size": 'a number of bytes such as 65536 or "64MiB"',
        "number": "a number of seconds",
        "switch": "true or false",
        "list": "a text or a list of texts",
        "integers": "whole numbers separated by commas",
        "choice": "a text",
        "choices": "names separated by commas",
    }[setting.kind]
    if setting.low is not None and setting.high is not None:
        return f"{words} from {setting.low:g} to {setting.high:g}"
    return words if setting.low is None else f"{words}, at least {setting.low:g}"


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


def _build(values: Mapping[str, Any]) -> Config:
    """Distribute the values over the slices, and copy into the scheduler's slice what it shares with others."""
    fields: dict[str, dict[str, Any]] = {setting.slice: {} for setting in SETTINGS}
    for key, value in values.items():
        setting = BY_KEY[key]
        fields[setting.slice][setting.field] = value
    prefill = tuple(url.rstrip("/") for url in fields["server"].get("prefill", ()))
    return share(
        Config(
            model=ModelConfig(**fields["model"]),
            engine=EngineConfig(**fields["engine"]),
            scheduler=SchedulerConfig(**fields["scheduler"]),
            transfer=TransferConfig(**fields["transfer"]),
            group=GroupConfig(**fields["group"]),
            kv_events=KvEventsConfig(**fields["kv_events"]),
            server=ServerConfig(**{**fields["server"], "prefill": prefill}),
        )
    )


def share(config: Config) -> Config:
    """Fill the scheduler's copies of fields that belong to other slices."""
    scheduler = msgspec.structs.replace(
        config.scheduler,
        page_size=config.engine.page_size,
        kv_pages=config.engine.kv_pages,
        max_model_len=config.model.max_model_len,
        kv_events=config.kv_events.port != 0,
    )
    return msgspec.structs.replace(config, scheduler=scheduler)


def to_toml(config: Config) -> str:
    """The configuration as a TOML file that load() reads back to the same values. Keys and passwords are left out."""
    lines = []
    for setting in SETTINGS:
        value = setting.value(config)
        if setting.secret:
            lines.append(f"# {setting.key}: {'set, not shown' if value else 'not set'}")
        elif setting.kind == "text" and not value:
            lines.append(f'# {setting.key} = ""')
        else:
            lines.append(f"{setting.key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return str(value)
