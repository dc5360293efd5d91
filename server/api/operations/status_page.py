"""GET /: a page for operators, and GET /status: the JSON that it shows.

The page has no data and needs no key: a browser sends none when it opens an address. It asks for the key, keeps it in
memory, and sends it with every GET /status, which needs one. Texts of clients and peers (ids, errors) reach the
document as text nodes only; should that fail, the policy lets no script but the page's own run, and nothing be loaded
from or sent to another place.
"""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.api.response.streaming import JsonAnswer
from headrace.server.frontend.server_status import ServerStatus, StatusCollector

PAGE = "data/page.html"
FOR_OPERATORS = "for_operators"  # 403


def status_routes(status: StatusCollector) -> APIRouter:
    """The page and its data."""
    router = APIRouter()
    page = (files("headrace.server") / PAGE).read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": content_policy(page),
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    body = page.encode()

    @router.get("/")
    async def index() -> Response:
        return Response(body, headers=headers, media_type="text/html; charset=utf-8")

    @router.get("/status")
    async def server_status(http: Request) -> Response:
        """403 for the key of a tenant: the answer names requests of all tenants."""
        if http.scope.get("state", {}).get("tenant", ""):
            message = "this needs a key of --api-key: the answer names requests of all tenants"
            raise HeadraceError(ErrorInfo(code=FOR_OPERATORS, message=message, status=403))

        async def work() -> ServerStatus:
            return await status.status()

        return JsonAnswer(work)

    return router


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
