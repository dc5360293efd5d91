"""From the bytes of a request body to its struct. Every error names the field; explain.py has the words."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from headrace.core.runtime.codec import NO_MESSAGE
from headrace.core.types.errors import invalid
from headrace.server.api.request.explain import explaining, not_json, refuse_repeated_keys
from headrace.server.api.request.other_fields import without_other_fields
from headrace.server.http.body import SMALL

B = TypeVar("B", bound=msgspec.Struct)
T = TypeVar("T")
_UNKNOWN = "Object contains unknown field `"  # how msgspec's complaint begins


def parse_body(body: bytes | bytearray, kind: type[B]) -> B:
    """Decode a body; of a key that is given twice the last one counts. Raises HeadraceError (400) if it is not a JSON
    object of this kind."""
    with explaining(body, kind):
        found = _decoded(body, kind)
        return found or msgspec.json.decode(without_other_fields(body, kind), type=kind)


async def decode_body(body: bytes | bytearray, kind: type[B]) -> B:
    """parse_body() that never holds up the event loop for more than one pass over a large body, and raises
    HeadraceError (400) for a key that is given twice, too."""
    with explaining(body, kind):
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
