"""TOML configuration files: reading one, and writing a configuration as one."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.core.config import Config
from headrace.core.types.errors import ConfigError
from headrace.server.config.settings import BY_KEY, GROUPS, SETTINGS, Setting
from headrace.server.config.values import nearest, parse_value


def read_toml(path: Path, known: Mapping[str, Setting] = BY_KEY) -> dict[str, Any]:
    """Returns the parsed values by key. A key may be written with underscores in place of dashes. known: settings by
    key.

    Raises ConfigError for a file that cannot be read, no valid TOML, unknown keys and wrong values.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error
    values: dict[str, Any] = {}
    for name, given in table.items():
        setting = known.get(name.replace("_", "-"))
        if setting is None:
            raise ConfigError(f"{path}: unknown key {name!r}{nearest(name.replace('_', '-'), known)}")
        values[setting.key] = parse_value(setting, given, f"{path}: {name}")
    return values


def to_toml(config: Config) -> str:
    """The configuration as a TOML file, in groups, that load() reads back to the same values. Secrets are left out."""
    sections = []
    for group in GROUPS:
        settings = [setting for setting in SETTINGS if setting.flag.group == group]
        sections.append("\n".join([f"# {group}", *(_line(setting, config) for setting in settings)]))
    return "\n\n".join(sections) + "\n"


def _line(setting: Setting, config: Config) -> str:
    value = setting.value(config)
    if setting.flag.secret:
        return f"# {setting.key}: {'set, not shown' if value else 'not set'}"
    if setting.kind == "text" and not value:
        return f'# {setting.key} = ""'
    return f"{setting.key} = {_toml_value(value)}"


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return str(value)
