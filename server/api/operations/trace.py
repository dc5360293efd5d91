"""GET /debug/trace: what the server does in the next seconds, for Perfetto. Needs a key where one is set."""

import math

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.types.errors import invalid
from headrace.server.api.response.answer import Answer
from headrace.server.frontend.service import Service

DEFAULT_S = 5.0
SHORTEST_S, LONGEST_S = 0.1, 60.0


def debug_routes(service: Service) -> APIRouter:
    """Routes for those who want to know why it is slow."""
    router = APIRouter()

    @router.get("/debug/trace")
    async def trace(request: Request) -> Response:
        seconds = _seconds(request)

        async def work() -> msgspec.Raw:
            return msgspec.Raw(await service.trace(seconds))

        return Answer(work)

    return router


def _seconds(request: Request) -> float:
    """Raises HeadraceError (400)."""
    for name in request.query_params:
        if name != "seconds":
            raise invalid(name, f"unknown parameter {name}; there is seconds", code="unknown_field")
    text = request.query_params.get("seconds", str(DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_S <= seconds <= LONGEST_S:
        message = f"seconds must be a number from {SHORTEST_S:g} to {LONGEST_S:g}, found {text!r}"
        raise invalid("seconds", message)
    return seconds
