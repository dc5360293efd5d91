"""GET /: a page for operators, and GET /status: the JSON that it shows.

The page has no data and needs no key: a browser sends none when it opens an address. It asks for the key, keeps it in
memory, and sends it with every GET /status, which needs one.
"""

from fastapi import APIRouter
from starlette.responses import Response

from headrace.server.api.description.operation import HTML, described
from headrace.server.api.operations.html_page import HtmlPage
from headrace.server.frontend.status.server_status import ServerStatus, StatusCollector
from headrace.server.http.streaming import JsonAnswer

PAGE = "data/page.html"


def status_routes(status: StatusCollector) -> APIRouter:
    """The page and its data."""
    router = APIRouter()
    page = HtmlPage(PAGE)

    @router.get("/", openapi_extra=described("A page for operators", media_type=HTML, audience="everyone"))
    async def index() -> Response:
        return page.response()

    @router.get("/status", openapi_extra=described("What the page shows", reply=ServerStatus, audience="operators"))
    async def server_status() -> Response:
        async def work() -> ServerStatus:
            return await status.status()

        return JsonAnswer(work)

    return router
