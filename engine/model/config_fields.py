"""Reads single values of a parsed config.json."""

from collections.abc import Mapping
from typing import Any

from headrace.core.types.errors import ConfigError


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number; the default where the key is missing or null. Raises ConfigError for anything else."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json must say {key} as a whole number, found {config.get(key)!r}")
    return value
