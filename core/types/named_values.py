"""Settings of the form NAME=VALUE, as OpenTelemetry's environment variables write them."""

from collections.abc import Iterable
from urllib.parse import unquote

from headrace.core.types.errors import ConfigError


def named_values(given: Iterable[str], option: str) -> dict[str, str]:
    """The values by name; %XX stands for a character. The last value of a name counts. Raises ConfigError, which does
    not show the value: it may be a secret. option: the flag, for the error."""
    found: dict[str, str] = {}
    for number, text in enumerate(given, 1):
        name, equals, value = text.partition("=")
        name, value = unquote(name.strip()), unquote(value.strip())
        if not equals or not name or not value.isprintable() or not name.isprintable():
            raise ConfigError(f"{option}: value {number} is not of the form NAME=VALUE")
        found[name] = value
    return found
