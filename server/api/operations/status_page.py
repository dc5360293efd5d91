"""GET /: a page for operators, and GET /status: the JSON that it shows.

The page has no data and needs no key: a browser sends none when it opens an address. It asks for the key, keeps it in
memory, and sends it with every GET /status, which needs one.
"""

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.server.api.description.operation import HTML, described
from headrace.server.api.operations.html_page import HtmlPage
from headrace.server.api.response.streaming import JsonAnswer
from headrace.server.frontend.status.server_status import ServerStatus, StatusCollector

PAGE = "data/page.html"
FOR_OPERATORS = "for_operators"  # 403


def status_routes(status: StatusCollector) -> APIRouter:
    """The page and its data."""
    router = APIRouter()
    page = HtmlPage(PAGE)

    @router.get("/", openapi_extra=described("A page for operators", media_type=HTML, open=True))
    async def index() -> Response:
        return page.response()

    @router.get("/status", openapi_extra=described("What the page shows", reply=ServerStatus, errors=(403,)))
    async def server_status(http: Request) -> Response:
        """403 for the key of a tenant: the answer names requests of all tenants."""
        if http.scope.get("state", {}).get("tenant", ""):
            message = "this needs a key of --api-key: the answer names requests of all tenants"
            raise HeadraceError(ErrorInfo(code=FOR_OPERATORS, message=message, status=403))

        async def work() -> ServerStatus:
            return await status.status()

        return JsonAnswer(work)

    return router
