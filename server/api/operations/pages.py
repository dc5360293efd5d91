"""Pages for people, and the JSON that they show: GET / and GET /status for operators, GET /docs and GET /openapi.json,
what every route takes and answers.

A page is one file with no data, loads nothing from another place, and needs no key: a browser sends none when it opens
an address. It asks for the key, keeps it in memory, and sends it with every request for its data, which needs one if
keys are set. Texts of clients and peers reach the document as text nodes only; should that fail, the policy lets no
script but the page's own run, and nothing be loaded from or sent to another place.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from headrace.core.version import headrace_version
from headrace.server.api.description.document import document
from headrace.server.api.description.operation import HTML, JSON, described
from headrace.server.frontend.status.server_status import ServerStatus, StatusCollector
from headrace.server.http.streaming import JsonAnswer

PAGE, DOCS = "data/page.html", "data/docs.html"
ABOUT = {
    "prefill": "A prefill server: it computes prompts and sends their KV to decode servers. Its completions are for "
    "routers that name a handoff; they are the first token, and never streams.",
    "decode": "A decode server: it fetches the KV of prompts from prefill servers, and generates.",
    "colocated": "A server that computes prompts and generates.",
}

_DOCS = described("A page that shows this document", media_type=HTML, audience="everyone")


def status_routes(status: StatusCollector) -> APIRouter:
    """The page and its data."""
    router = APIRouter()
    page = HtmlPage(PAGE)

    @router.get("/", openapi_extra=described("A page for operators", media_type=HTML, audience="everyone"))
    async def index() -> Response:
        return page.response()

    @router.get("/status", openapi_extra=described("What the page shows", reply=ServerStatus, audience="operators"))
    async def server_status() -> Response:
        return JsonAnswer(status.status)

    return router


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


class HtmlPage:
    """A page of server/data, and the headers that go with it."""

    def __init__(self, name: str) -> None:
        page = (files("headrace.server") / name).read_text(encoding="utf-8")
        self._body = page.encode()
        self._headers = {
            "Content-Security-Policy": content_policy(page),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    def response(self) -> Response:
        """The page."""
        return Response(self._body, headers=self._headers, media_type=HTML)


def content_policy(page: str) -> str:
    """Content-Security-Policy of a page: its own style and script by their hashes, its own server, nothing else."""
    sources = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()}'"
        for kind, found in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL)
    }
    return (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
