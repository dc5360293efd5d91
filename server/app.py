"""The HTTP application: routes, error form, keys, accounts."""

from fastapi import FastAPI

from headrace.core.config import ServerConfig
from headrace.server.api.native.prefill import handoff_routes, native_routes
from headrace.server.api.openai.routes import openai_routes
from headrace.server.api.operations.discovery import bootstrap_routes, discovery_routes
from headrace.server.api.operations.health import operation_routes
from headrace.server.api.operations.tokenization import tokenizer_routes
from headrace.server.api.operations.trace import debug_routes
from headrace.server.api.response.errors import install_handlers
from headrace.server.api.response.middleware import Accounts, ApiKeys
from headrace.server.api.sglang.generate import generate_routes
from headrace.server.frontend.service import Service


def create_app(service: Service, config: ServerConfig) -> FastAPI:
    """The ASGI application over a service, which the caller starts and stops."""
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None)
    install_handlers(app)
    for routes in (  # looked through in this order: those of prompts first
        native_routes(service, config),
        openai_routes(service, config),
        generate_routes(service, config),
        operation_routes(service),
        debug_routes(service),
        discovery_routes(service, config),
        tokenizer_routes(service, config),
        bootstrap_routes(service),
        handoff_routes(service, config),
    ):
        app.include_router(routes)
    return _guarded(app, service, config)


def create_bootstrap_app(service: Service, config: ServerConfig) -> FastAPI:
    """What a prefill server answers on its bootstrap port: where its control endpoint is."""
    app = FastAPI(title="Headrace bootstrap", docs_url=None, redoc_url=None, openapi_url=None)
    install_handlers(app)
    for routes in (operation_routes(service), bootstrap_routes(service), handoff_routes(service, config)):
        app.include_router(routes)
    return _guarded(app, service, config)


def _guarded(app: FastAPI, service: Service, config: ServerConfig) -> FastAPI:
    app.add_middleware(ApiKeys, keys=config.api_keys)
    app.add_middleware(Accounts, metrics=service.metrics, clock=service.clock)
    return app
