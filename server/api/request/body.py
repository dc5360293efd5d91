"""Reading and decoding request bodies. Every error names the field."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid
from headrace.server.api.request.json_faults import not_json, refuse_repeated_keys
from headrace.server.api.request.strict_fields import without_other_fields
from headrace.server.http.body_budget import BodyBudget, BodyShare
from headrace.server.http.bounds import out_of_range
from headrace.server.http.content_coding import PIECE, Decoder, body_decoder
from headrace.server.http.structure import MAX_DEPTH, excess, limits, nests_deeper

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
SILENCE_S = 30.0  # of a client in the middle of its body
SMALL = 1 << 16  # bytes of a body that is looked at in the event loop
# How msgspec's complaints begin and end.
_AT = " - at `$"
_UNKNOWN = "Object contains unknown field `"
_MISSING = "Object missing required field `"
_QUOTED = re.compile(r"`([a-z | ]+)`")
_WORDS = {
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


async def read_body(request: Request, limit: int, budget: BodyBudget) -> bytearray:
    """The whole body, decoded. Raises HeadraceError: 413 for one over the limit (without reading it if it declares its
    size) or with too many parts, 415 for a Content-Encoding that is not decoded here, 400 for one that does not hold or
    for nesting, 503 if the budget for bodies that are being received is used up, 408 for one that stalls, 499 if the
    client disconnects."""
    decoder = body_decoder(request.headers.getlist("content-encoding"))
    tenant = request.scope.get("state", {}).get("tenant", "")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else None
    if size is not None and size > limit:
        raise _too_large(f"the body has {declared} bytes", limit)
    if size is not None and size > SMALL:
        budget.check(size, tenant)
    share = BodyShare(budget, tenant)
    try:
        body = await _received(request, limit, size, share, decoder)
        if len(body) <= SMALL:
            _check_structure(body, limit)
        else:
            await asyncio.to_thread(_check_structure, body, limit)
    finally:
        share.give_back()
    return body


async def _received(
    request: Request, limit: int, size: int | None, share: BodyShare, decoder: Decoder | None
) -> bytearray:
    """The body, held once. size: what it declares. decoder: of its coding. Raises HeadraceError as read_body() does."""
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENCE_S) as deadline:
            async for part in request.stream():
                for piece in (part,) if decoder is None else decoder.pieces(part):
                    body += piece
                    if len(body) > limit:
                        raise _too_large("the body is larger", limit)
                    if decoder is not None or len(body) != size:  # more is to come
                        share.take(len(piece))
                    if len(piece) == PIECE:
                        await asyncio.sleep(0)
                deadline.reschedule(loop.time() + SILENCE_S)
        if decoder is not None:
            decoder.finish()
    except ClientDisconnect as error:
        raise HeadraceError(ErrorInfo(code="cancelled", message="the client disconnected", status=499)) from error
    except TimeoutError as error:
        message = f"nothing more of the body has come for {SILENCE_S:g} s"
        raise HeadraceError(ErrorInfo(code="body_timeout", message=message, status=408)) from error
    return body


def _check_structure(body: bytearray, limit: int) -> None:
    """Raises HeadraceError for a body that would take too long, or too deep a stack, to decode."""
    if (over := excess(body, limits(limit))) is not None:
        message = f"the body has more than {over.most} {over.what}, which is the limit; send less in one request"
        raise HeadraceError(ErrorInfo(code="body_too_large", message=message, status=413))
    if nests_deeper(body, MAX_DEPTH):
        message = f"the body is no valid JSON: its lists and objects nest more than {MAX_DEPTH} deep"
        raise HeadraceError(ErrorInfo(code="invalid_json", message=message, status=400))


def _too_large(what: str, limit: int) -> HeadraceError:
    message = f"{what}, and the limit is {limit} bytes (--max-body-bytes)"
    return HeadraceError(ErrorInfo(code="body_too_large", message=message, status=413))


def parse_body(body: bytes | bytearray, kind: type[B]) -> B:
    """Decode a body; of a key that is given twice the last one counts. Raises HeadraceError (400) if it is not a JSON
    object of this kind."""
    with _explaining(body, kind):
        found = _decoded(body, kind)
        return found or msgspec.json.decode(without_other_fields(body, kind), type=kind)


async def decode_body(body: bytes | bytearray, kind: type[B]) -> B:
    """parse_body() that never holds up the event loop for more than one pass over a large body, and raises
    HeadraceError (400) for a key that is given twice, too."""
    with _explaining(body, kind):
        found = _decoded(body, kind)
        if found is None:
            found = msgspec.json.decode(await _aside(partial(without_other_fields, kind=kind), body), type=kind)
        await _aside(refuse_repeated_keys, body)
        return found


async def decode_object(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a body whose fields another server reads. Raises HeadraceError (400) if it is no JSON object, or gives a
    key twice."""
    try:
        found = msgspec.json.decode(body)
    except NO_MESSAGE as error:
        raise not_json(body, error) from error
    if not isinstance(found, dict):
        raise invalid("body", "the body has to be a JSON object")
    await _aside(refuse_repeated_keys, body)
    return found


async def _aside(work: Callable[[bytes | bytearray], T], body: bytes | bytearray) -> T:
    """What work makes of a body, in a thread if that is a large one."""
    return work(body) if len(body) <= SMALL else await asyncio.to_thread(work, body)


def _decoded(body: bytes | bytearray, kind: type[B]) -> B | None:
    """None if it has a field that the struct has not."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if not str(error).startswith(_UNKNOWN):
            raise
        return None


@contextmanager
def _explaining(body: bytes | bytearray, kind: type[msgspec.Struct]) -> Iterator[None]:
    """Makes msgspec's complaints HeadraceErrors (400)."""
    try:
        yield
    except msgspec.ValidationError as error:
        raise _explained(str(error), body, kind) from error
    except NO_MESSAGE as error:
        raise not_json(body, error) from error


def _explained(text: str, body: bytes | bytearray, kind: type[msgspec.Struct]) -> HeadraceError:
    """A msgspec complaint as one of ours, with the field as a path."""
    complaint, at, end = text.rpartition(_AT)
    path = end.removeprefix(".").removesuffix("`")
    if not at or not text.endswith("`"):
        complaint, path = text, ""
    if (missing := _named(_MISSING, complaint)) is not None:
        field = _joined(path, missing)
        return invalid(field, f"{field} is required", code="missing_field")
    if (words := out_of_range(complaint, body, kind, path)) is not None:
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
