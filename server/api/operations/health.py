"""GET /health, /ready and /metrics, which need no key, and GET /kv_event_sources, which does."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.config import KvEventsConfig
from headrace.core.types import refusals
from headrace.server.api.description.operation import described
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.http.error_response import error_response
from headrace.server.http.streaming import json_response
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.engine_gauges import engine_gauges
from headrace.server.telemetry.exposition import CONTENT_TYPE, render
from headrace.server.telemetry.kv_event_publisher import publisher_endpoint


class StatusReply(msgspec.Struct):
    """Of probes."""

    status: Literal["ok", "ready"]


_HEALTH = described("Whether this process works", reply=StatusReply, errors=(503,), audience="everyone")
_READY = described("Whether a request would be served now", reply=StatusReply, errors=(503,), audience="everyone")
_METRICS = described("Metrics for Prometheus", media_type=CONTENT_TYPE, audience="everyone")
_KV_EVENTS = described(
    "Where events of the prefix cache are published, by rank", reply=dict[str, Any], audience="operators"
)


def operation_routes(
    readiness: Readiness,
    stats: StatsCollector,
    kv_events: KvEventsConfig,
    page_size: int,
    replicas: int = 1,
    vllm_model: Callable[[], str] | None = None,
) -> APIRouter:
    """Routes for orchestrators, Prometheus, and routers that follow the prefix cache. replicas: data-parallel ones.
    vllm_model: the model_name of gauges under vLLM's names, where /metrics is to have them."""
    router = APIRouter()

    @router.get("/health", openapi_extra=_HEALTH)
    async def health() -> Response:
        """200 while this process and the scheduler respond."""
        if problem := readiness.unhealthy():
            return error_response(refusals.UNHEALTHY.error(problem=problem))
        return json_response(StatusReply("ok"))

    @router.get("/ready", openapi_extra=_READY)
    async def ready() -> Response:
        """200 if a request sent now would be served."""
        if (problem := readiness.not_ready()) is not None:
            return error_response(problem)
        return json_response(StatusReply("ready"))

    @router.get("/metrics", openapi_extra=_METRICS)
    async def metrics() -> Response:
        found = await stats.snapshot()
        text = render(found, CATALOG)
        if vllm_model is not None:
            text += engine_gauges(found).as_vllm(page_size, vllm_model())
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/kv_event_sources", openapi_extra=_KV_EVENTS)
    async def kv_event_sources() -> Response:
        """Where routers can subscribe to events of the prefix cache."""
        return json_response(_kv_event_sources(kv_events, page_size, replicas))

    return router


def _kv_event_sources(events: KvEventsConfig, page_size: int, replicas: int) -> dict[str, Any]:
    """Sources by data-parallel rank, as in vLLM 0.32; empty if no events are published. All ranks share a publisher;
    each batch says whose it is."""
    if not events.port:
        return {}
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher_endpoint(events.host, events.port),
        "replay_endpoint": publisher_endpoint(events.host, events.replay_port) if events.replay_port else None,
        "buffer_steps": events.buffer,
        "hwm": events.buffer,
        "topic": events.topic,
        "block_size": page_size,
        "block_hash": "headrace-kv-1",
    }
    return {str(rank): {**source, "data_parallel_rank": rank} for rank in range(replicas)}
