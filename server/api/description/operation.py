"""What a route says of itself, beside its path and method: openapi_extra of its decorator, made by described()."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from headrace.server.api.request.router_headers import PREFER_HEADER, PREFILLER_HEADER
from headrace.server.api.request.terms import REPLICA_HEADER, SLO_HEADER
from headrace.server.http.audience import Audience, Audiences
from headrace.server.http.ranges import ObjectiveMs, Replica

JSON = "application/json"
EVENTS = "text/event-stream"
HTML = "text/html; charset=utf-8"
# Statuses of errors, by what a route does. All may answer 401 where there are keys, and 500.
BODY_ERRORS = (400, 404, 408, 413, 415, 503)  # of reading a body; 404 for another model
WORK_ERRORS = (409, 429, 502, 503, 504)  # of computing a prompt
GENERATION_ERRORS = (*BODY_ERRORS, *WORK_ERRORS)
COMPLETION_ERRORS = (*GENERATION_ERRORS, 412)  # of a prompt that is not cached
REASONS = {499: "Cancelled", 500: "The model's results are no numbers, or a mistake in the server; see its log"}


class Parameter(msgspec.Struct, frozen=True):
    """A part of the path, of the query, or a header."""

    name: str
    place: str
    """path, query or header."""
    type: Any
    about: str


GENERATION_HEADERS = (
    Parameter(SLO_HEADER, "header", ObjectiveMs, "slo_ttft_ms of a body that has none."),
    Parameter(REPLICA_HEADER, "header", Replica, "data_parallel_rank of a body that has none."),
)
COMPLETION_HEADERS = (
    *GENERATION_HEADERS,
    Parameter(PREFILLER_HEADER, "header", str, "HOST:PORT of the prefill server that is to compute it (role decode)."),
    Parameter(PREFER_HEADER, "header", str, "if-available: 412 unless most of the prompt is cached (role decode)."),
)


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path."""

    summary: str
    body: type[msgspec.Struct] | None = None
    reply: Any = None
    """Type of the JSON of status 200; None for another media type."""
    other_replies: tuple[Any, ...] = ()
    """Types that the JSON may have otherwise."""
    media_type: str = JSON
    """Of status 200."""
    events: tuple[Any, ...] = ()
    """Types of the data of events where the body asks for a stream; empty for no streams."""
    errors: tuple[int, ...] = ()
    """Statuses beside 200 and those of all routes."""
    parameters: tuple[Parameter, ...] = ()
    audience: Audience = "clients"


def described(summary: str, **about: Any) -> dict[str, Any]:
    """openapi_extra of a route. about: fields of Operation."""
    return {"operation": Operation(summary=summary, **about)}


def audiences(routers: Sequence[APIRouter]) -> Audiences:
    """Whom the routes of an application are for: clients, where they do not say it. routers: in its order."""
    return Audiences([(route, _audience(route)) for router in routers for route in router.routes])


def _audience(route: BaseRoute) -> Audience:
    extra = route.openapi_extra if isinstance(route, APIRoute) else None
    operation: Operation | None = (extra or {}).get("operation")
    return operation.audience if operation is not None else "clients"


def reason(status: int) -> str:
    """A status in words."""
    return REASONS.get(status) or HTTPStatus(status).phrase
