"""Refuses unknown and unserved fields of a body at every depth, and takes out those that change nothing. Pure.

Bodies with served fields alone never come here: decoding them into their structs, which forbid all others, has
succeeded. For the others the structs say where there are objects; everything else stays undecoded.
"""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from headrace.core.types.errors import HeadraceError, invalid, shown
from headrace.server.api.request.other_fields import OTHER_FIELDS, SAME_AS, OtherField

NEAR_CHARS = 64  # of an unknown field, to be compared with those that there are
NOTHING_BYTES = 512  # of a value that may ask for nothing
Kind = type[msgspec.Struct]


def without_other_fields(body: bytes | bytearray, kind: Kind) -> bytes:
    """The body with the fields of its struct alone. Raises HeadraceError (400) for an unknown field, with the nearest
    known one, and for one that is not served and asks for something."""
    return bytes(_cleaned(msgspec.Raw(body), kind, ""))


def _cleaned(raw: msgspec.Raw, kind: Kind, path: str) -> msgspec.Raw:
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return raw  # no object: decoding it says so
    served = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    others = other_fields(kind)
    kept: dict[str, msgspec.Raw] = {}
    for name, value in given.items():
        if name in served:
            kept[name] = _nested(value, served[name], _joined(path, name))
        elif name not in others:
            raise _unknown(name, path, (*served, *others))
        elif others[name].refused and not _asks_for_nothing(value, others[name]):
            text = f"{_joined(path, name)} is not supported ({others[name].why}); leave it out"
            raise invalid(_joined(path, name), text, code="unsupported")
    return msgspec.Raw(msgspec.json.encode(kept))


def _nested(raw: msgspec.Raw, annotation: Any, path: str) -> msgspec.Raw:
    """A value that is an object with fields, or a list of such, if its type says so."""
    objects, lists = _structs_in(annotation)
    text = bytes(raw).lstrip()
    if objects and text.startswith(b"{"):
        return _cleaned(raw, objects[0], path)
    if lists and text.startswith(b"["):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        parts = [_cleaned(item, lists[0], f"{path}[{index}]") for index, item in enumerate(items)]
        return msgspec.Raw(msgspec.json.encode(parts))
    return raw


def _structs_in(annotation: Any) -> tuple[list[Kind], list[Kind]]:
    """Structs that a type allows, and those that it allows in lists."""
    options = get_args(annotation) if not _is_list(annotation) else (annotation,)
    options = options or (annotation,)
    objects = [option for option in options if _is_strict(option)]
    lists = [item for option in options if _is_list(option) for item in get_args(option) if _is_strict(item)]
    return objects, lists


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def _is_strict(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) and annotation in OTHER_FIELDS


def other_fields(kind: Kind) -> Mapping[str, OtherField]:
    """Other fields of a struct and of those that it extends."""
    return {name: field for each in reversed(kind.__mro__) for name, field in OTHER_FIELDS.get(each, {}).items()}


def _asks_for_nothing(raw: msgspec.Raw, field: OtherField) -> bool:
    if len(bytes(raw)) > NOTHING_BYTES:
        return False
    value = msgspec.json.decode(raw)
    if isinstance(value, list) and all(item in field.neutral_items for item in value):
        return True
    return value is None or value is False or value in ("", {}) or _is_among(value, field.neutral)


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """1 is 1.0, but True is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)


def _unknown(name: str, path: str, known: tuple[str, ...]) -> HeadraceError:
    near = [field for field in SAME_AS.get(name, ()) if field in known][:1]
    near = near or (difflib.get_close_matches(name, known, n=1) if len(name) <= NEAR_CHARS else [])
    hint = f"; did you mean {near[0]}?" if near else ""
    field = shown(name) or '""'
    return invalid(_joined(path, field), f"unknown field {field}{hint}", code="unknown_field")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
