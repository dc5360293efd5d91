"""The OpenAPI document of a server: every route as its decorator describes it, with the structs that bodies are decoded
into."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from headrace.server.api.description.operation import EVENTS, JSON, Operation, reason
from headrace.server.api.description.struct_schema import Schema, components
from headrace.server.http.audience import Audience
from headrace.server.http.error_response import ErrorReply

OPENAPI = "3.1.0"
KEY = "key"
EVERYWHERE = (500,)
NO_KEY = 401
NOT_ENOUGH = 403  # a key of --tenant-key
_ID = {"description": "What the request is called in the logs.", "schema": {"type": "string"}}
_EVENT = {
    "type": "object",
    "description": "A server-sent event. Its data is JSON as x-event says, or [DONE] at the end.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_SCHEME = {"description": "Bearer.", "schema": {"type": "string"}}
_RETRY = {"description": "Seconds after which a retry makes sense.", "schema": {"type": "integer", "minimum": 1}}


def operations(routers: Sequence[APIRouter]) -> Iterator[tuple[str, str, Operation]]:
    """Path, method and description of all routes. Raises KeyError for a route without one."""
    for router in routers:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            for method in sorted(route.methods or ()):
                yield route.path_format, method.lower(), (route.openapi_extra or {})["operation"]


def document(title: str, version: str, about: str, routers: Sequence[APIRouter], *, keys: bool) -> Schema:
    """The document. keys: whether the server has API keys."""
    found = list(operations(routers))
    wanted: list[Any] = [ErrorReply]
    for _, _, operation in found:
        wanted += [
            operation.body,
            operation.reply,
            *operation.other_replies,
            *operation.events,
            *(each.type for each in operation.parameters),
        ]
    schemas, named = components(wanted)
    by_type = dict(zip(wanted, schemas, strict=True))
    paths: dict[str, Schema] = {}
    for path, method, operation in found:
        paths.setdefault(path, {})[method] = _operation(path, method, operation, by_type, keys=keys)
    statuses = {NO_KEY, NOT_ENOUGH, *EVERYWHERE, *(status for _, _, operation in found for status in operation.errors)}
    errors = {str(status): _error(status, by_type[ErrorReply]) for status in sorted(statuses)}
    security = {"securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}}} if keys else {}
    return {
        "openapi": OPENAPI,
        "info": {"title": title, "version": version, "description": about},
        "paths": paths,
        "components": {"schemas": dict(sorted(named.items())), "responses": errors, **security},
    }


def _operation(path: str, method: str, operation: Operation, schemas: dict[Any, Schema], *, keys: bool) -> Schema:
    locked = keys and operation.audience != "everyone"
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{method}_{re.sub(r'[^a-z0-9]+', '_', path).strip('_')}".rstrip("_"),
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": each.name,
                "in": each.place,
                "required": each.place == "path",
                "description": each.about,
                "schema": schemas[each.type],
            }
            for each in operation.parameters
        ]
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schemas[operation.body]}}}
    statuses = sorted({*operation.errors, *EVERYWHERE, *_key_errors(operation.audience if keys else "everyone")})
    errors = {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}
    described["responses"] = {"200": _success(operation, schemas), **errors}
    return {**described, **({"security": [{KEY: []}]} if locked else {})}


def _key_errors(audience: Audience) -> tuple[int, ...]:
    """Statuses of requests without a key, or with one that is not enough."""
    return {"everyone": (), "clients": (NO_KEY,), "operators": (NO_KEY, NOT_ENOUGH)}[audience]


def _success(operation: Operation, schemas: dict[Any, Schema]) -> Schema:
    text: Schema = {"type": "string"}
    schema = text if operation.reply is None else schemas[operation.reply]
    if operation.other_replies:
        schema = {"anyOf": [schema, *(schemas[each] for each in operation.other_replies)]}
    content: Schema = {operation.media_type: {"schema": schema}}
    if operation.events:
        found = [schemas[each] for each in operation.events]
        data = found[0] if len(found) == 1 else {"anyOf": found}
        content[EVENTS] = {"schema": _EVENT, "x-event": data}
    return {"description": "OK", "headers": {"X-Request-Id": _ID}, "content": content}


def _error(status: int, schema: Schema) -> Schema:
    headers: Schema = {"X-Request-Id": _ID}
    if status in (429, 503, 504):
        headers["Retry-After"] = _RETRY
    if status == NO_KEY:
        headers["WWW-Authenticate"] = _SCHEME
    return {"description": reason(status), "headers": headers, "content": {JSON: {"schema": schema}}}
