"""Command-line flags of `headrace serve`, `headrace check` and `headrace gateway`: one per setting, in groups."""

import argparse
from collections.abc import Sequence

from headrace.server.config.settings import GROUPS, SETTINGS, Kind, Setting

_METAVARS: dict[Kind, str] = {
    "text": "TEXT",
    "integer": "N",
    "size": "BYTES",
    "number": "SECONDS",
    "list": "TEXT",
    "integers": "N,N,...",
    "choices": "NAME,NAME,...",
}


NUMBERS = ("share", "factor")
"""Units of numbers that are no seconds."""


def add_flags(parser: argparse.ArgumentParser, settings: Sequence[Setting] = SETTINGS) -> None:
    """Add --config and one flag per setting. A flag that is not given leaves no attribute in the namespace."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of the keys below (without the dashes)")
    for group in GROUPS:
        section = parser.add_argument_group(group)
        for setting in settings:
            if setting.flag.group == group:
                add_flag(section, setting)


def add_flag(section: "argparse._ArgumentGroup", setting: Setting) -> None:
    """Add the flag of one setting, without a default."""
    if setting.kind == "switch":
        section.add_argument(
            setting.option,
            dest=setting.key,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=_help(setting),
        )
        return
    section.add_argument(
        setting.option,
        dest=setting.key,
        action="append" if setting.kind == "list" else "store",
        default=argparse.SUPPRESS,
        metavar=setting.flag.unit.upper() if setting.flag.unit in NUMBERS else _metavar(setting),
        help=_help(setting),
    )


def _metavar(setting: Setting) -> str:
    return _METAVARS.get(setting.kind) or "{" + ",".join(setting.choices) + "}"


def _help(setting: Setting) -> str:
    flag, value = setting.flag, setting.default
    text = f"{flag.help}; also {flag.variable}" if flag.variable else flag.help
    if value in ("", ()) or flag.secret:
        return text
    return f"{text} (default: {_shown(setting.kind, value)})"


def _shown(kind: Kind, value: object) -> str:
    """A default as a user would write it."""
    match value:
        case bool():
            return "on" if value else "off"
        case tuple():
            return ",".join(map(str, value))
        case int() if kind == "size" and value % (1 << 20) == 0:
            return f"{value >> 20}MiB"
        case float():
            return f"{value:g}"
        case _:
            return str(value)
