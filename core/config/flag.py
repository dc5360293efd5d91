"""Declares a field as a user setting: its flag, TOML key, help, bounds and environment variable, in its type.

    hold_lease_s: Annotated[float, Flag("hold-lease", HANDOFF, "seconds …", low=0.001)] = 30.0

server/config/settings.py derives everything else from the annotation: how the value is parsed from its type, choices
from a Literal, the default from the field.
"""

from typing import Literal

import msgspec

FlagGroup = Literal[
    "server", "model", "HTTP", "security", "scheduling", "KV cache", "KV handoff", "pipeline stages", "telemetry"
]
SERVER: FlagGroup = "server"
MODEL: FlagGroup = "model"
HTTP: FlagGroup = "HTTP"
SECURITY: FlagGroup = "security"
SCHEDULING: FlagGroup = "scheduling"
KV_CACHE: FlagGroup = "KV cache"
HANDOFF: FlagGroup = "KV handoff"
STAGES: FlagGroup = "pipeline stages"
TELEMETRY: FlagGroup = "telemetry"

MAX_PORT = 65535


class Flag(msgspec.Struct, frozen=True):
    """Metadata of an Annotated field: --KEY on the command line and KEY in a TOML file set it."""

    key: str
    """Name of the flag without its dashes, and TOML key."""
    group: FlagGroup
    """Heading under which `headrace serve --help` lists the flag."""
    help: str
    """One line; the default and the environment variable are appended to it."""
    low: float | None = None
    """Lowest value of a number, inclusive."""
    high: float | None = None
    """Highest value of a number, inclusive."""
    unit: Literal["", "bytes", "share", "factor"] = ""
    """An int in bytes may also be written with a unit, such as "64MiB". A float is in seconds, unless it is a share or
    a factor."""
    secret: bool = False
    """Never printed or put into an error message."""
    variable: str = ""
    """Environment variable that sets it, too; a flag takes precedence, a file does not."""


def port_flag(key: str, group: FlagGroup, help: str) -> Flag:
    """A flag whose value is a TCP port, 0 included."""
    return Flag(key, group, help, low=0, high=MAX_PORT)
