"""What is wrong with the JSON of a body, in words: keys given twice, and what makes it no JSON. Pure."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid, shown

LOOKED_AT = 1 << 20  # bytes of a body that is decoded again for the place of a key: other clients wait meanwhile
_COLON = re.compile(rb"\s*:")
# Of the inside of a string: anything but a surrogate whose other half is not beside it.
_WHOLE = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89a-fA-F]))*+"
)
_MARKS = {b"\xef\xbb\xbf": "a byte order mark", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def refuse_repeated_keys(body: bytes | bytearray) -> None:
    """Raises HeadraceError (400) for a key that an object of the body, at any depth, has twice: decoders take either.
    The body is JSON, as decoding it has shown."""
    key = _repeated_key(body)
    if key is None:
        return
    place = _place(body) or shown(key) or '""'
    raise invalid(place, f"{place} is given twice; send it once", code="repeated_field")


def _repeated_key(body: bytes | bytearray) -> str | None:
    """The first key that an object has twice. Much faster than decoding token ids: it makes nothing of what is between
    strings."""
    text = bytes(body)
    if b"\\" in text:  # every quote is to begin or end a string, and everything to stay where it is
        text = text.replace(b"\\\\", b"\0\0").replace(b'\\"', b"\0\0")
    pieces = text.split(b'"')  # by turns outside of strings and inside
    objects: list[set[bytes]] = []
    at = 0
    for number, piece in enumerate(pieces):
        if number % 2 == 0:
            if b"{" in piece or b"}" in piece:
                _nest(objects, piece)
        elif pieces[number + 1].startswith(b":") or _COLON.match(pieces[number + 1]):
            key = piece
            if b"\\" in piece or b"\0" in piece:
                key = msgspec.json.decode(body[at - 1 : at + len(piece) + 1], type=str).encode()
            if key in objects[-1]:
                return key.decode(errors="replace")
            objects[-1].add(key)
        at += len(piece) + 1
    return None


def _nest(objects: list[set[bytes]], piece: bytes) -> None:
    """Open and close objects as this piece of a body does."""
    for opened, part in enumerate(piece.split(b"{")):
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
