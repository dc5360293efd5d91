"""The settings of servers and gateways, derived from the Flag annotations of the slices in headrace.core.config."""

from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from headrace.core.config import Config, Flag
from headrace.core.config.flag import FlagGroup
from headrace.core.config.gateway import GatewaySlices

Kind = Literal["text", "integer", "size", "number", "switch", "choice", "list", "integers", "choices"]

GROUPS: tuple[FlagGroup, ...] = get_args(FlagGroup)
_KINDS: dict[Any, Kind] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "switch",
    tuple[str, ...]: "list",
    tuple[int, ...]: "integers",
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One flag and TOML key, and the field of a configuration slice that it fills."""

    flag: Flag
    slice: str
    """Field of the struct of all slices."""
    field: str
    """Field of the slice."""
    kind: Kind
    """How a value is parsed; from the field's type."""
    choices: tuple[str, ...] = ()
    """Of the field's Literal type."""
    default: Any

    @property
    def key(self) -> str:
        """TOML key, and name of the flag without its dashes."""
        return self.flag.key

    @property
    def option(self) -> str:
        """The flag as it is written on the command line."""
        return f"--{self.flag.key}"

    def value(self, config: msgspec.Struct) -> object:
        """Returns what a configuration holds under this key."""
        return msgspec.structs.asdict(msgspec.structs.asdict(config)[self.slice])[self.field]


def _derive(slices: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """All settings, in the order of their groups, within a group in the order of the fields. slices: their struct."""
    found = [
        _setting(slice_field.name, field, flag)
        for slice_field in msgspec.structs.fields(slices)
        for field in msgspec.structs.fields(slice_field.type)
        if (flag := _flag(field)) is not None
    ]
    return tuple(sorted(found, key=lambda setting: GROUPS.index(setting.flag.group)))


def _flag(field: msgspec.structs.FieldInfo) -> Flag | None:
    metadata = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
    return next((item for item in metadata if isinstance(item, Flag)), None)


def _setting(slice_name: str, field: msgspec.structs.FieldInfo, flag: Flag) -> Setting:
    kind, choices = _kind(get_args(field.type)[0], flag)
    return Setting(flag=flag, slice=slice_name, field=field.name, kind=kind, choices=choices, default=field.default)


def _kind(declared: Any, flag: Flag) -> tuple[Kind, tuple[str, ...]]:
    """How values of a type are parsed, and the choices among them."""
    if get_origin(declared) is Literal:
        return "choice", get_args(declared)
    if get_origin(declared) is tuple and get_origin(get_args(declared)[0]) is Literal:
        return "choices", get_args(get_args(declared)[0])
    kind = _KINDS[declared]
    return ("size" if kind == "integer" and flag.unit == "bytes" else kind), ()


SETTINGS: tuple[Setting, ...] = _derive(Config)
BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
GATEWAY_SETTINGS: tuple[Setting, ...] = _derive(GatewaySlices)
"""Of `headrace gateway`; a key may mean something else there than in SETTINGS."""
