"""GET /openapi.json, what every route takes and answers, and GET /docs, a page that shows it.

The page has no data and needs no key, like that of GET /; the document needs one if keys are set.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.version import headrace_version
from headrace.server.api.description.document import document
from headrace.server.api.description.operation import HTML, JSON, described
from headrace.server.api.operations.html_page import HtmlPage

DOCS = "data/docs.html"
ABOUT = {
    "prefill": "A prefill server: it computes prompts and sends their KV to decode servers. Its completions are for "
    "routers that name a handoff; they are the first token, and never streams.",
    "decode": "A decode server: it fetches the KV of prompts from prefill servers, and generates.",
    "colocated": "A server that computes prompts and generates.",
}

_DOCS = described("A page that shows this document", media_type=HTML, audience="everyone")


def document_routes(routers: Sequence[APIRouter], role: str, *, keys: bool) -> APIRouter:
    """Routes that describe those of routers, and themselves. keys: whether the server has API keys."""
    router = APIRouter()
    page = HtmlPage(DOCS)

    @router.get("/openapi.json", openapi_extra=described("This document", reply=dict[str, Any]))
    async def openapi() -> Response:
        return Response(body, media_type=JSON)

    @router.get("/docs", openapi_extra=_DOCS)
    async def docs() -> Response:
        return page.response()

    all_routers = (*routers, router)
    body = msgspec.json.encode(document("Headrace", headrace_version(), ABOUT[role], all_routers, keys=keys))
    return router
