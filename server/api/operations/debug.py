"""GET /debug/trace: a recording of the next seconds, for Perfetto; POST /debug/record: the last minutes of the
scheduler into a file; and GET /debug/experts: rows that each expert of each layer has computed. For operators: a
recording names requests and tickets of all tenants."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.messages.replies import RecordingWritten
from headrace.core.runtime.clock import wall_offset
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid, shown
from headrace.core.types.ranks.expert_load import total_rows
from headrace.core.version import headrace_version
from headrace.server.api.description.operation import Parameter, described
from headrace.server.api.operations.alerts import AlertNotification
from headrace.server.api.request.parse import parse_body
from headrace.server.frontend.served_model import ServedModel
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.streaming import JsonAnswer
from headrace.server.telemetry.trace_report import trace_json
from headrace.server.telemetry.tracer import Tracer

DEFAULT_S = 5.0
SHORTEST_S, LONGEST_S = 0.1, 60.0
MAX_BODY_BYTES = 1 << 20  # of alerts: Alertmanager's max_alerts says how many
WriteRecording = Callable[[str], Awaitable[RecordingWritten]]
"""For alerts that fire, in words; "" for no alerts."""
Seconds = Annotated[float, msgspec.Meta(ge=SHORTEST_S, le=LONGEST_S)]


class LayerRows(msgspec.Struct, frozen=True):
    """Rows computed by the experts of one layer, over all ranks, since the stages were last started."""

    layer: int
    """Counted from 0."""
    rows: list[int]
    """By expert."""


class ExpertRowsReply(msgspec.Struct, frozen=True):
    """Body of the response."""

    layers: list[LayerRows]
    """Layers that have experts; empty for a dense model."""


class RecordingReply(msgspec.Struct, frozen=True):
    """Body of the response."""

    file: str
    """Name of the file in the folder of --record, on the server's machine; "" where alerts have written none: no alert
    of the notification fires, or there was a file of alerts in the last five minutes."""
    bytes: int
    alerts: str = ""
    """Those that fire, in words."""


_TRACE = described(
    "A recording of the next seconds, for Perfetto",
    reply=dict[str, Any],
    errors=(400, 409),
    audience="operators",
    parameters=(Parameter("seconds", "query", Seconds, f"Its length; {DEFAULT_S:g} if it is not given."),),
)
_RECORD = described(
    "The last minutes of the scheduler into a file, for headrace replay; without a body, or as Alertmanager's webhook",
    body=AlertNotification,
    reply=RecordingReply,
    errors=(400, 408, 409, 413, 415, 503),
    audience="operators",
)
_EXPERTS = described("Rows that experts have computed", reply=ExpertRowsReply, audience="operators")


def debug_routes(
    tracer: Tracer,
    stats: StatsCollector,
    model: ServedModel,
    role: str,
    record: WriteRecording | None,
    budget: BodyBudget,
) -> APIRouter:
    """Routes for finding out why a server is slow, or did what it did, and whether tokens are spread evenly over
    experts. record: None on a server that records nothing."""
    router = APIRouter()

    @router.get("/debug/trace", openapi_extra=_TRACE)
    async def trace(http: Request) -> Response:
        seconds = _seconds(http)

        async def work() -> msgspec.Raw:
            recording = await tracer.record(seconds)
            about = {"version": headrace_version(), "role": role, "model": model.name}
            # Thousands of spans take long enough to encode to delay other requests of this event loop.
            return msgspec.Raw(
                await asyncio.to_thread(trace_json, recording, wall_offset() + recording.paused_s, about)
            )

        return JsonAnswer(work)

    @router.post("/debug/record", openapi_extra=_RECORD)
    async def write_recording(http: Request) -> Response:
        body = await read_body(http, MAX_BODY_BYTES, budget)
        about = parse_body(body, AlertNotification) if bytes(body) not in (b"", b"{}") else None
        firing = "" if about is None else about.firing

        async def work() -> RecordingReply:
            if record is None:
                message = "this server records nothing: start it with --record DIR"
                raise HeadraceError(ErrorInfo(code="not_recording", message=message, status=409))
            if about is not None and not firing:
                return RecordingReply("", 0)
            written = await record(firing)
            if written.error:
                raise HeadraceError(ErrorInfo(code="not_recorded", message=written.error, status=500))
            return RecordingReply(written.name, written.bytes, firing)

        return JsonAnswer(work)

    @router.get("/debug/experts", openapi_extra=_EXPERTS)
    async def experts() -> Response:
        async def work() -> ExpertRowsReply:
            totals = total_rows(await stats.expert_loads())
            return ExpertRowsReply([LayerRows(layer, rows) for layer, rows in totals.items()])

        return JsonAnswer(work)

    return router


def _seconds(http: Request) -> float:
    """The length of the recording. Raises HeadraceError (400)."""
    for name in http.query_params:
        if name != "seconds":
            raise invalid(name, f"unknown parameter {name}; there is seconds", code="unknown_field")
    text = http.query_params.get("seconds", str(DEFAULT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_S <= seconds <= LONGEST_S:
        message = f"seconds must be a number from {SHORTEST_S:g} to {LONGEST_S:g}, found {shown(text)!r}"
        raise invalid("seconds", message)
    return seconds
