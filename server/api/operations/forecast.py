"""GET /v1/forecast: how long the queue is going to be, what prompts would be promised, what one more server changes."""

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.forecast import ForecastReport, QueueOutlook
from headrace.server.api.description.operation import described
from headrace.server.api.response.usage import Count
from headrace.server.http.streaming import json_response

NOT_FORECAST = ErrorInfo(
    code="unsupported", message="nothing is forecast here: start the server with --promise p99, say", status=404
)


class OutlookReply(msgspec.Struct):
    """Seconds of computing that wait, over the horizon."""

    p50_s: float
    p99_s: float


class BoundReply(msgspec.Struct):
    """What a prompt would be promised if it came now."""

    tokens: Count
    """Of the prompt, none of them cached."""
    ttft_bound_ms: float


class ForecastResponse(msgspec.Struct):
    """Of GET /v1/forecast. Fields are null before the first forecast."""

    promise: float
    """Share of the promised times that are to be kept."""
    queue_s: float
    """Predicted seconds of computing what is admitted and not planned."""
    queue: OutlookReply | None
    """The same over the next seconds."""
    queue_with_one_more_server: OutlookReply | None
    """The same if one more server took half of what comes to this one from now on."""
    horizon_s: float | None
    """Seconds that were looked ahead."""
    bounds: list[BoundReply]
    """By length, ascending; empty while nothing is promised."""
    age_s: float | None
    """Seconds since the state that the forecast is from."""


_FORECAST = described(
    "How long the queue is going to be, and what prompts would be promised", reply=ForecastResponse, errors=(404, 503)
)


def forecast_routes(ask: Callable[[], Awaitable[ForecastReport]]) -> APIRouter:
    """The forecast of servers with --promise. ask: asks the scheduler; raises HeadraceError (503)."""
    router = APIRouter()

    @router.get("/v1/forecast", openapi_extra=_FORECAST)
    async def forecast() -> Response:
        report = await ask()
        if not report.promise:
            raise HeadraceError(NOT_FORECAST)
        return json_response(_reply(report))

    return router


def _reply(report: ForecastReport) -> ForecastResponse:
    return ForecastResponse(
        promise=report.promise,
        queue_s=report.queue_s,
        queue=_outlook(report.queue),
        queue_with_one_more_server=_outlook(report.one_more),
        horizon_s=report.horizon_s,
        bounds=[BoundReply(bound.tokens, round(1000 * bound.ttft_s, 3)) for bound in report.bounds],
        age_s=report.age_s,
    )


def _outlook(found: QueueOutlook | None) -> OutlookReply | None:
    return None if found is None else OutlookReply(found.p50_s, found.p99_s)
