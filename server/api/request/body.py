"""Reading and decoding request bodies. Every error names the field."""

import difflib
import re
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid

B = TypeVar("B", bound=msgspec.Struct)
_AT = re.compile(r"(.*) - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_QUOTED = re.compile(r"`([a-z | ]+)`")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises HeadraceError: 413 for one over the limit, without reading it if it declares its size; 499
    if the client disconnects."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(f"the body has {declared} bytes", limit)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise _too_large("the body is larger", limit)
    except ClientDisconnect as error:
        raise HeadraceError(ErrorInfo(code="cancelled", message="the client disconnected", status=499)) from error
    return bytes(body)


def _too_large(what: str, limit: int) -> HeadraceError:
    message = f"{what}, and the limit is {limit} bytes (--max-body-bytes)"
    return HeadraceError(ErrorInfo(code="body_too_large", message=message, status=413))


def parse_body(body: bytes, kind: type[B]) -> B:
    """Decode a body. Raises HeadraceError (400) if it is not a JSON object of this kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error), kind) from error
    except NO_MESSAGE as error:
        message = f"the body is no valid JSON: {error}"
        raise HeadraceError(ErrorInfo(code="invalid_json", message=message, status=400)) from error


def _explained(text: str, kind: type[msgspec.Struct]) -> HeadraceError:
    """The error for a message of msgspec: with the path of the field, and the nearest name for an unknown field."""
    match = _AT.match(text)
    complaint, path = (match[1], match[2]) if match else (text, "")
    if unknown := _UNKNOWN.match(complaint):
        near = difflib.get_close_matches(unknown[1], [field.encode_name for field in msgspec.structs.fields(kind)], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return invalid(_joined(path, unknown[1]), f"unknown field {unknown[1]}{hint}", code="unknown_field")
    if missing := _MISSING.match(complaint):
        field = _joined(path, missing[1])
        return invalid(field, f"{field} is required", code="missing_field")
    complaint = _QUOTED.sub(_plain_types, complaint)
    complaint = complaint[:1].lower() + complaint[1:]
    return invalid(path or "body", f"{path or 'body'}: {complaint}", code="invalid_type")


def _plain_types(match: re.Match[str]) -> str:
    """msgspec's names of JSON types, in words."""
    names = match[1].split(" | ")
    return " or ".join(_WORDS.get(name, name) for name in names if name != "null" or names == ["null"])


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
