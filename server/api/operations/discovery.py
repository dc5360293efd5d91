"""What routers ask of a server beside completions: who it is, where its control endpoint is, whether it computes, its
load."""

import secrets
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.stats import Stats, join
from headrace.core.types.addresses import url
from headrace.core.types.errors import unavailable
from headrace.core.types.request import SamplingParams
from headrace.server.api.response.answer import Answer, json_response
from headrace.server.api.response.errors import error_response
from headrace.server.api.response.handoff import reachable_host
from headrace.server.frontend.generation import Job, ignore
from headrace.server.frontend.service import Service
from headrace.server.version import headrace_version

PROBE_TIMEOUT_S = 20.0


def discovery_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Routes under the names that SGLang, vLLM and Dynamo give them."""
    router = APIRouter()

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        return json_response(_server_info(service, config))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> Response:
        model = service.config.model.model
        return json_response(
            {
                "model_path": model,
                "tokenizer_path": model,
                "served_model_name": service.model_name,
                "is_generation": True,
                "max_model_len": service.max_model_len,
            }
        )

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": headrace_version()})

    @router.get("/ping")
    async def ping() -> Response:
        problem = service.not_ready()
        return json_response({}) if problem is None else error_response(problem)

    @router.get("/health_generate")
    async def health_generate() -> Response:
        """200 when a token was computed just now; its KV goes nowhere."""
        deadline = min(PROBE_TIMEOUT_S, service.config.scheduler.stage_timeout_s)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        job = Job(rid=f"health-{secrets.token_hex(16)}", prompt=(0,), sampling=sampling, deadline_s=deadline)

        async def probe() -> dict[str, str]:
            await service.prefill(job, ignore)
            return {"status": "ok"}

        return Answer(probe)

    @router.get("/get_load")
    async def get_load() -> Response:
        """As SGLang has it, a list with one entry for each data-parallel rank, of which there is one."""
        return json_response([_load(service, join(await service.stats()))])

    return router


def bootstrap_routes(service: Service) -> APIRouter:
    """GET /query: how Mooncake's peers and routers find a prefill server. Open without a key: it tells an address."""
    router = APIRouter()

    @router.get("/query")
    async def query(request: Request) -> Response:
        engine = service.engine
        if engine is None or not engine.control_port:
            raise unavailable("the server is loading, or has no control endpoint", code="not_ready")
        host = reachable_host(service.config.transfer.host, request.url.hostname or "")
        worker = {"engine_id": engine.instance, "worker_addr": {"0": {"0": url("tcp", host, engine.control_port)}}}
        return json_response({"0": worker})

    return router


def _load(service: Service, stats: Stats) -> dict[str, int]:
    values = {(sample.name, *sample.labels): int(sample.value) for sample in stats.samples}
    return {
        "dp_rank": 0,
        "num_reqs": service.open_requests,
        "num_waiting_reqs": values.get(("queue_requests", "waiting"), 0),
        "num_tokens": sum(value for (name, *_), value in values.items() if name == "queue_tokens"),
    }


def _server_info(service: Service, config: ServerConfig) -> dict[str, Any]:
    """Names that routers look for; the prefix cache's block size is a page."""
    engine, settings = service.engine, service.config
    page_size = settings.engine.page_size
    return {
        "model_path": settings.model.model,
        "model_id": service.model_name,
        "served_model_name": service.model_name,
        "version": headrace_version(),
        "instance_id": engine.instance if engine is not None else "",
        "disaggregation_mode": "null" if config.role == "colocated" else config.role,
        "disaggregation_bootstrap_port": config.bootstrap_port or None,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": settings.scheduler.stages,
        "kv_block_size": page_size,
        "page_size": page_size,
        "max_model_len": service.max_model_len,
        "max_total_num_tokens": engine.kv_pages * page_size if engine is not None else 0,
    }
