"""The ASGI applications of a server: routes, error responses, API keys, request metrics."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, FastAPI

from headrace.core.config.scheduler import PROMISES
from headrace.core.runtime.process import max_http_connections
from headrace.core.types.requests.tenants import tenant_keys
from headrace.server.api.description.operation import audiences
from headrace.server.api.native.open_routes import OpenPromptOpener, open_routes
from headrace.server.api.native.prefill_routes import PrefillResponder, handoff_routes, prefill_routes, prefix_routes
from headrace.server.api.openai.completion_opener import CompletionOpener
from headrace.server.api.openai.openai_routes import openai_routes
from headrace.server.api.operations.debug import debug_routes
from headrace.server.api.operations.discovery import bootstrap_routes, discovery_routes, load_routes
from headrace.server.api.operations.forecast import forecast_routes
from headrace.server.api.operations.health import operation_routes
from headrace.server.api.operations.kv_hints import kv_hint_routes
from headrace.server.api.operations.pages import document_routes, status_routes
from headrace.server.api.operations.tokenization import tokenizer_routes
from headrace.server.api.response.completion_endpoint import CompletionEndpoint
from headrace.server.api.scoring.score_routes import score_routes
from headrace.server.api.sglang.generate_route import generate_routes
from headrace.server.api.vllm.render_routes import render_routes
from headrace.server.api.vllm.token_routes import token_routes
from headrace.server.frontend.request.image_memory import CountImages
from headrace.server.frontend.service import Service
from headrace.server.http.body import BodyBudget
from headrace.server.http.error_response import install_handlers
from headrace.server.http.middleware import ApiKeys, RequestMetrics
from headrace.server.http.rules import HttpRules, allowed_methods, site_guard


def create_app(service: Service) -> FastAPI:
    """All routes of a server. The caller starts and stops the service."""
    model, completions, control = service.model, service.completions, service.control
    config, server = service.config, service.config.server
    budget = BodyBudget(server.max_body_bytes)
    service.metrics.include(budget.statistics)
    completion_opener = CompletionOpener(model, service.open_prompts, server)
    endpoint = CompletionEndpoint(model, completions, control, server, budget, service.open_prompts, completion_opener)
    responder = PrefillResponder(model, completions, server)
    opener = OpenPromptOpener(model, service.open_prompts, server)
    routers = [  # matched in this order: those of prompts first
        prefill_routes(responder, completions, opener, server, budget, service.open_prompts.drop),
        open_routes(model, service.open_prompts, responder, server, budget),
        prefix_routes(model, completions, server, budget),
        openai_routes(model, endpoint),
        generate_routes(model, endpoint),
        token_routes(model, endpoint),
        score_routes(model, completions, config, budget),
        render_routes(model, server, budget),
        _operation_routes(service),
        status_routes(service.status),
        debug_routes(service.tracer, service.stats, model, server.role, service.record, budget),
        discovery_routes(model, control, config),
        load_routes(service.readiness, completions, service.stats, config),
        tokenizer_routes(model, server, budget),
        kv_hint_routes(model, completions, server, budget),
        forecast_routes(service.forecast),
        bootstrap_routes(control, service.config.server.role),
        handoff_routes(model, control, service.stats, config),
    ]
    keys = bool(server.api_keys or server.tenant_keys)
    routers.append(document_routes(routers, server.role, keys=keys))
    app = _app("Headrace", routers, service)
    app.add_middleware(CountImages, memory=model.image_memory)
    return app


def create_bootstrap_app(service: Service) -> FastAPI:
    """Routes of a prefill server's bootstrap port: where its control endpoint is."""
    model, control = service.model, service.control
    routers = [
        _operation_routes(service),
        bootstrap_routes(control, service.config.server.role),
        handoff_routes(model, control, service.stats, service.config),
    ]
    return _app("Headrace bootstrap", routers, service)


def _operation_routes(service: Service) -> APIRouter:
    config = service.config
    return operation_routes(
        service.readiness,
        service.stats,
        config.kv_events,
        config.engine.page_size,
        config.scheduler.dp,
        vllm_model=(lambda: service.model.name) if config.server.metrics_names == "vllm" else None,
    )


def _app(title: str, routers: Sequence[APIRouter], service: Service) -> FastAPI:
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    install_handlers(app, partial(allowed_methods, routers))
    for router in routers:
        app.include_router(router)
    server = service.config.server
    app.add_middleware(
        ApiKeys,
        keys=server.api_keys,
        tenants=tenant_keys(server.tenant_keys),
        max_open=max_http_connections() // 2,
        audiences=audiences(routers),
    )
    keys = bool(server.api_keys or server.tenant_keys)
    app.add_middleware(HttpRules, pages=site_guard(server.host, server.allowed_hosts, keys=keys))
    app.add_middleware(
        RequestMetrics,
        metrics=service.metrics,
        clock=service.clock,
        recent=service.recent,
        sampler=service.sampler,
        record_span=service.record_span,
        promise=PROMISES[service.config.scheduler.promise],
    )
    return app
