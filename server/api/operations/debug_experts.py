"""GET /debug/experts: rows that each expert of each layer has computed. For operators."""

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.types.ranks.expert_load import total_rows
from headrace.server.api.description.operation import described
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.http.streaming import JsonAnswer


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


_EXPERTS = described("Rows that experts have computed", reply=ExpertRowsReply, audience="operators")


def expert_routes(stats: StatsCollector) -> APIRouter:
    """Route that shows whether tokens are spread evenly over experts."""
    router = APIRouter()

    @router.get("/debug/experts", openapi_extra=_EXPERTS)
    async def experts() -> Response:
        async def work() -> ExpertRowsReply:
            totals = total_rows(await stats.expert_loads())
            return ExpertRowsReply([LayerRows(layer, rows) for layer, rows in totals.items()])

        return JsonAnswer(work)

    return router
