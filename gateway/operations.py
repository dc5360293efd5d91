"""What gateways of all kinds have around the routes of prompts: operations, API keys, metrics of requests."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from headrace.core.runtime.process import max_http_connections
from headrace.core.types.errors import MODEL_NOT_FOUND, HeadraceError, invalid, shown
from headrace.core.version import headrace_version
from headrace.gateway.base import BaseGateway
from headrace.gateway.metrics import GATEWAY_CATALOG
from headrace.server.api.description.operation import audiences, described
from headrace.server.api.scoring.score_routes import SCORING_PATHS
from headrace.server.http.body import BodyBudget
from headrace.server.http.error_response import error_response, install_handlers
from headrace.server.http.middleware import ApiKeys, RequestMetrics
from headrace.server.http.rules import HttpRules, allowed_methods, site_guard
from headrace.server.http.streaming import json_response
from headrace.server.telemetry.exposition import CONTENT_TYPE, render


def gateway_app(title: str, gateway: BaseGateway, prompt_routes: Callable[[BodyBudget], APIRouter]) -> FastAPI:
    """The application of a gateway. prompt_routes: makes the routes of its kind, whose bodies share a budget."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    config = gateway.config
    budget = BodyBudget(config.max_body_bytes)
    gateway.front_metrics.include(budget.statistics)
    routers = [prompt_routes(budget), _scoring_routes(), _operation_routes(gateway)]
    install_handlers(app, partial(allowed_methods, routers))
    for router in routers:
        app.include_router(router)
    app.add_middleware(
        ApiKeys,
        keys=config.api_keys,
        tenants={},
        max_open=max_http_connections() // 2,
        audiences=audiences(routers),
    )
    app.add_middleware(HttpRules, pages=site_guard(config.host, config.allowed_hosts, keys=bool(config.api_keys)))
    app.add_middleware(RequestMetrics, metrics=gateway.front_metrics, clock=gateway.clock, recent=gateway.recent)
    return app


def one_model(entries: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The entry of GET /v1/models with this name. Raises HeadraceError (404) if there is none."""
    found = next((entry for entry in entries if entry["id"] == name), None)
    if found is None:
        raise unknown_model(name, [entry["id"] for entry in entries])
    return found


def unknown_model(name: str, served: Sequence[str]) -> HeadraceError:
    """The error of a model that no decode engine serves."""
    message = f"the model {shown(name)!r} is not served here; this gateway serves {', '.join(served)}"
    return invalid("model", message, code=MODEL_NOT_FOUND, status=404)


def _scoring_routes() -> APIRouter:
    """Paths of work that ends with the prompt, which no decode engine takes part in."""
    router = APIRouter()

    async def elsewhere() -> Response:
        message = "a gateway computes nothing: send what is to be scored to a prefill server"
        raise invalid("items", message, code="wrong_role", status=404)

    for path in SCORING_PATHS:
        router.add_api_route(path, elsewhere, methods=["POST"])
    return router


def _operation_routes(gateway: BaseGateway) -> APIRouter:
    router = APIRouter()

    @router.get("/health", openapi_extra=described("Whether this process works", audience="everyone"))
    async def health() -> Response:
        """200 while this process works, also while it waits for decode engines."""
        problem = gateway.unhealthy()
        return json_response({"status": "ok"}) if problem is None else error_response(problem)

    @router.get("/ready", openapi_extra=described("Whether a prompt would be handed over", audience="everyone"))
    async def ready() -> Response:
        """200 if a prompt sent now would be handed over."""
        problem = gateway.not_ready()
        return json_response({"status": "ready"}) if problem is None else error_response(problem)

    @router.get("/metrics", openapi_extra=described("Metrics for Prometheus", audience="everyone"))
    async def metrics() -> Response:
        text = render(gateway.statistics(), GATEWAY_CATALOG) + gateway.engine_metrics()
        return Response(text, media_type=CONTENT_TYPE)

    @router.get("/version", openapi_extra=described("The release"))
    async def version() -> Response:
        return json_response({"version": headrace_version()})

    return router
