"""GET /health, /ready, /metrics: open without a key, for orchestrators and Prometheus."""

from fastapi import APIRouter
from starlette.responses import Response

from core.errors import ErrorInfo
from server.api.answers import json_response
from server.api.errors import error_response
from server.metrics import CONTENT_TYPE, render
from server.service import Service


def operation_routes(service: Service) -> APIRouter:
    """Routes for those who run the server."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while this process and the scheduler turn."""
        if problem := service.unhealthy():
            return error_response(ErrorInfo(code="unhealthy", message=problem, status=503, retry_after_s=1.0))
        return json_response({"status": "ok"})

    @router.get("/ready")
    async def ready() -> Response:
        """200 when a request sent now would be served."""
        if (problem := service.not_ready()) is not None:
            return error_response(problem)
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(render(await service.stats()), media_type=CONTENT_TYPE)

    return router
