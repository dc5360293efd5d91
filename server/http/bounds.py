"""Words for a value that is out of the range of its type. msgspec names one bound, the one that is broken. Pure."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from msgspec import inspect

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import shown

_BROKEN = re.compile(r"Expected `(\w+)` (?:of length )?([<>]=?) ")
_NO_CHOICE = "Invalid enum value"
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_NAMES = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.ListType: "array",
    inspect.DictType: "object",
}
_MOST = (1 << 63) - 1  # no bound but that of the number's size
_LONG = 24  # digits of a number that is repeated
LOOKED_AT = 1 << 20  # bytes of a body that is decoded again for the value that it has: other clients wait meanwhile

Number = inspect.IntType | inspect.FloatType
Sized = inspect.StrType | inspect.ListType | inspect.DictType


def out_of_range(complaint: str, body: bytes | bytearray, kind: type[msgspec.Struct], path: str) -> str | None:
    """The value and what is allowed, to be said after the name of the field; None for other complaints."""
    steps = [name or index for name, index in _STEP.findall(path)]
    if complaint.startswith(_NO_CHOICE):
        return _not_among(_value_at(body, steps), _types_at(inspect.type_info(kind), steps))
    if (match := _BROKEN.match(complaint)) is None:
        return None
    value = _value_at(body, steps)
    for found in _types_at(inspect.type_info(kind), steps):
        if _NAMES.get(type(found)) == match[1]:
            if isinstance(found, Sized):
                return _length(value, found)
            if isinstance(found, inspect.IntType | inspect.FloatType):
                text = "" if value is None else f"is {shown(value.decode(), _LONG)}; it "
                return f"{text}has to be {_range(found, too_big=match[2] == '<=')}"
    return None


def _not_among(value: bytes | None, types: Iterator[inspect.Type]) -> str | None:
    choices = [json.dumps(each) for found in types if isinstance(found, inspect.LiteralType) for each in found.values]
    if not choices:
        return None
    text = "" if value is None else f"is {shown(value.decode(), _LONG)}; it "
    return f"{text}has to be {' or '.join(choices)}"


def _types_at(start: inspect.Type, steps: list[str]) -> Iterator[inspect.Type]:
    """The types that a value may have at this place; several in a union."""
    if isinstance(start, inspect.UnionType):
        for each in start.types:
            yield from _types_at(each, steps)
    elif not steps:
        yield start
    elif isinstance(start, inspect.StructType):
        for field in start.fields:
            if field.encode_name == steps[0]:
                yield from _types_at(field.type, steps[1:])
    elif isinstance(start, inspect.ListType):
        yield from _types_at(start.item_type, steps[1:])
    elif isinstance(start, inspect.DictType):
        yield from _types_at(start.value_type, steps[1:])


def _value_at(body: bytes | bytearray, steps: list[str]) -> bytes | None:
    """The text of a value; None where msgspec does not say which it is, the body is large, or ends in no JSON."""
    if "..." in steps or len(body) > LOOKED_AT:
        return None
    with suppress(*NO_MESSAGE):
        return bytes(_part(msgspec.Raw(body), steps)).strip()
    return None


def _part(raw: msgspec.Raw, steps: list[str]) -> msgspec.Raw:
    for step in steps:
        if step.isdigit() and bytes(raw).lstrip().startswith(b"["):
            raw = msgspec.json.decode(raw, type=list[msgspec.Raw])[int(step)]
        else:
            raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[step]
    return raw


def _length(value: bytes | None, found: Sized) -> str:
    noun = "characters" if isinstance(found, inspect.StrType) else "items"
    low, high = found.min_length or 0, found.max_length
    allowed = f"{low} to {high}" if low else f"at most {high}"
    if value is None:
        return f"has to have {allowed} {noun}"
    length = len(msgspec.json.decode(value, type=str | list[msgspec.Raw] | dict[str, msgspec.Raw]))
    return f"has {length} {noun}; {allowed} are allowed"


def _range(found: Number, *, too_big: bool) -> str:
    low, high = found.ge, found.le
    if found.gt is not None:
        return f"above {_plain(found.gt)}" + ("" if high is None else f" and at most {_plain(high)}")
    assert low is not None
    if high is None or (high == _MOST and low > -_MOST and not too_big):
        return f"at least {_plain(low)}"
    return f"from {_plain(low)} to {_plain(high)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else f"{bound:g}"
