"""What is wrong with a request body, in words: fields and types that msgspec complains of, values out of range, keys
given twice, and what makes it no JSON. Pure."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from msgspec import inspect

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid, shown

LOOKED_AT = 1 << 20  # bytes of a body that is decoded again for a place or a value: other clients wait meanwhile
WINDOW = 1 << 16  # bytes of a body that are searched for keys at a time
# How msgspec's complaints begin and end.
_AT = " - at `$"
_MISSING = "Object missing required field `"
_NO_CHOICE = "Invalid enum value"
_BROKEN = re.compile(r"Expected `(\w+)` (?:of length )?([<>]=?) ")  # names one bound, the one that is broken
_QUOTED = re.compile(r"`([a-z | ]+)`")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_PLAIN_NAME = re.compile(r"[^.\[]+")
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
Number = inspect.IntType | inspect.FloatType
Sized = inspect.StrType | inspect.ListType | inspect.DictType
_COLON = re.compile(rb"\s*:")
# Of the inside of a string: anything but a surrogate whose other half is not beside it.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F]))*+"
)
_MARKS = {b"\xef\xbb\xbf": "a byte order mark", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@contextmanager
def explaining(body: bytes | bytearray, kind: type[msgspec.Struct]) -> Iterator[None]:
    """Makes msgspec's complaints HeadraceErrors (400)."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _explained(str(error), body, kind) from error
    except NO_MESSAGE as error:
        raise not_json(body, error) from error


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name fields as this body has them. names: those by the names of the other routes."""
    try:
        yield
    except HeadraceError as error:
        field = error.info.field or ""
        name = _PLAIN_NAME.match(field)
        if name is None or name[0] not in names:
            raise
        renamed = names[name[0]] + field[name.end() :]
        message = error.info.message.replace(field, renamed, 1)
        raise HeadraceError(msgspec.structs.replace(error.info, field=renamed, message=message)) from error


def _explained(text: str, body: bytes | bytearray, kind: type[msgspec.Struct]) -> HeadraceError:
    """A msgspec complaint as one of ours, with the field as a path."""
    complaint, at, end = text.rpartition(_AT)
    path = end.removeprefix(".").removesuffix("`")
    if not at or not text.endswith("`"):
        complaint, path = text, ""
    if (missing := _named(_MISSING, complaint)) is not None:
        field = _joined(path, missing)
        return invalid(field, f"{field} is required", code="missing_field")
    if (words := _out_of_range(complaint, body, kind, path)) is not None:
        return invalid(path, f"{path} {words}")
    complaint = _QUOTED.sub(_plain_types, complaint)
    complaint = complaint[:1].lower() + complaint[1:]
    return invalid(path or "body", f"{path or 'body'}: {complaint}", code="invalid_type")


def _named(beginning: str, complaint: str) -> str | None:
    """The name that ends a complaint that begins so."""
    return complaint.removeprefix(beginning).rpartition("`")[0] if complaint.startswith(beginning) else None


def _plain_types(match: re.Match[str]) -> str:
    """msgspec's names of JSON types, in words."""
    names = match[1].split(" | ")
    return " or ".join(_WORDS.get(name, name) for name in names if name != "null" or names == ["null"])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _out_of_range(complaint: str, body: bytes | bytearray, kind: type[msgspec.Struct], path: str) -> str | None:
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


def refuse_repeated_keys(body: bytes | bytearray, field: str = "") -> None:
    """Raises HeadraceError (400) for a key that an object of the body, at any depth, has twice: decoders take either.
    The body is JSON, as decoding it has shown. field: whose value this is, if it is not the whole body."""
    key = _repeated_key(body)
    if key is None:
        return
    place = _joined(field, _place(body) or shown(key) or '""')
    raise invalid(place, f"{place} is given twice; send it once", code="repeated_field")


def _repeated_key(body: bytes | bytearray) -> str | None:
    """The first key that an object has twice. Much faster than decoding token ids, and takes little memory: it makes
    nothing of what is between strings, and looks at one window of the body after the other."""
    objects: list[set[bytes]] = []
    inside, opened, at = False, 0, 0  # of a string; where the last one began; what has been looked at
    while at < len(body):
        window = _window(body, at)
        if _without_keys(window) and not _COLON.match(body, at + len(window)):
            if quotes := window.count(b'"'):  # all that matters is whether the last string ends
                inside, opened = inside ^ bool(quotes % 2), at + window.rindex(b'"')
            at += len(window)
            continue
        for number, piece in enumerate(window.split(b'"')):
            if number:
                inside = not inside
                if inside:
                    opened = at
                elif piece[:1] == b":" or (not piece[:1].strip() and _COLON.match(body, at + 1)):
                    key = bytes(body[opened + 1 : at])
                    if b"\\" in key:
                        key = msgspec.json.decode(body[opened : at + 1], type=str).encode()
                    if key in objects[-1]:
                        return key.decode(errors="replace")
                    objects[-1].add(key)
                at += 1
            at += len(piece)
            if not inside and (b"{" in piece or b"}" in piece):
                _nest(objects, piece)
    return None


def _without_keys(window: bytes) -> bool:
    """Whether no object begins or ends in a part of a body, and no key that is followed by its colon there."""
    return b":" not in window and b"{" not in window and b"}" not in window


def _window(body: bytes | bytearray, at: int) -> bytes:
    """The next part of a body that ends within no escape; escapes of quotes and backslashes are blanked out, so that
    every quote in it begins or ends a string, and everything stays where it is."""
    window = bytes(body[at : at + WINDOW])
    if b"\\" not in window:
        return window
    if (len(window) - len(window.rstrip(b"\\"))) % 2:
        window += bytes(body[at + WINDOW : at + WINDOW + 1])
    return window.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0")


def _nest(objects: list[set[bytes]], piece: bytes) -> None:
    """Open and close objects as this piece of a body, which has no strings, does."""
    for opened, part in enumerate(piece.replace(b"{}", b"").split(b"{")):
        if opened:
            objects.append(set())
        if closed := part.count(b"}"):
            del objects[-closed:]


class _Pairs(list[tuple[str, Any]]):
    """An object as it was written."""


def _place(body: bytes | bytearray) -> str | None:
    """The path of the first key that an object has twice; None for a body that takes long."""
    if len(body) > LOOKED_AT:
        return None
    try:
        return _repeated_in(json.loads(body, object_pairs_hook=_Pairs), "")
    except (RecursionError, ValueError):  # more nesting than this decoder takes, longer numbers
        return None


def _repeated_in(value: Any, path: str) -> str | None:
    if isinstance(value, _Pairs):
        names: set[str] = set()
        for name, inner in value:
            here = f"{path}.{shown(name)}" if path else shown(name)
            if name in names:
                return here
            names.add(name)
            if (found := _repeated_in(inner, here)) is not None:
                return found
        return None
    items: Sequence[Any] = value if isinstance(value, list) else ()
    inside = (_repeated_in(item, f"{path}[{index}]") for index, item in enumerate(items))
    return next((found for found in inside if found is not None), None)


def not_json(body: bytes | bytearray, error: Exception) -> HeadraceError:
    """The error (400) for a body that decoding has failed for."""
    message = f"the body is no valid JSON: {_cause(body, error)}"
    return HeadraceError(ErrorInfo(code="invalid_json", message=message, status=400))


def _cause(body: bytes | bytearray, error: Exception) -> str:
    """Why a body is no JSON. msgspec says of several causes that the input was truncated."""
    if not body.strip():
        return "it is empty"
    for mark, name in _MARKS.items():
        if body.startswith(mark):
            return f"it begins with {name}; send UTF-8 without a mark"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        if error.object[error.start : error.start + 1] == b"\xed":
            return "half of a surrogate pair, as bytes, is in a text; send whole characters, in UTF-8"
        return f"a text is not in UTF-8 ({error.reason})"
    if (at := _half_surrogate(body)) is not None:
        half = bytes(body[at : at + 6]).decode(errors="replace")
        return f"{half} at byte {at} is half of a surrogate pair: a text was cut within a character"
    if "truncated" in str(error):
        return f"it ends after {len(body)} bytes, before its end"
    return str(error).removeprefix("JSON is malformed: ")


def _half_surrogate(body: bytes | bytearray) -> int | None:
    """Where the body has the escape of a surrogate without the other half."""
    match = _WHOLE.match(body)
    end = match.end() if match else len(body)
    return end if re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}").match(body, end) else None
