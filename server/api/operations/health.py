"""GET /health, /ready, /metrics: open without a key, for orchestrators and Prometheus; GET /kv_event_sources for
routers, with the key."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.config import Config
from headrace.core.types.errors import ErrorInfo
from headrace.server.api.response.answer import json_response
from headrace.server.api.response.errors import error_response
from headrace.server.frontend.service import Service
from headrace.server.telemetry.kv_events import endpoint
from headrace.server.telemetry.metrics import CONTENT_TYPE, render


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

    @router.get("/kv_event_sources")
    async def kv_event_sources() -> Response:
        """Where routers can follow the prefix cache."""
        return json_response(_kv_event_sources(service.config))

    return router


def _kv_event_sources(config: Config) -> dict[str, Any]:
    """By data-parallel rank, of which there is one, as vLLM 0.32 has it; nothing when no events are published."""
    events = config.kv_events
    if not events.port:
        return {}
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint(events.host, events.port),
        "replay_endpoint": endpoint(events.host, events.replay_port) if events.replay_port else None,
        "buffer_steps": events.buffer,
        "hwm": events.buffer,
        "topic": events.topic,
        "data_parallel_rank": 0,
        "block_size": config.engine.page_size,
        "block_hash": "headrace-kv-1",
    }
    return {"0": source}
