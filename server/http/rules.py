"""Rules of HTTP that hold for every route: HEAD, a trailing slash, methods, and pages in browsers."""

from collections.abc import Iterable, Sequence

from fastapi import APIRouter
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.peers.addresses import is_address, is_loopback
from headrace.server.frontend.request_log import RequestRecord
from headrace.server.http.error_response import error_response

FOREIGN_PAGE = "foreign_page"  # 403


class HttpRules:
    """Answers HEAD as GET (the connection leaves the body out), and a path with a slash at its end as the one without
    it: a redirect would send the client, with its key and its prompt, to where the Host header says."""

    def __init__(self, app: ASGIApp, pages: "SiteGuard | None" = None) -> None:
        """pages: refuses requests that a page in a browser may have caused."""
        self._app = app
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on in its plain form, which middleware around this one sees, too."""
        if scope["type"] == "http":
            if len(scope["path"]) > 1 and scope["path"].endswith("/"):
                scope["path"] = scope["path"][:-1]
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
            if self._pages is not None and (why := self._pages.refusal(scope["headers"])) is not None:
                record: RequestRecord | None = scope.get("state", {}).get("record")
                if record is not None:
                    record.answered(why)
                await error_response(why)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class SiteGuard:
    """Refuses what a page of another site has a browser send to a server on loopback, which asks for no key.

    A page can post to any address (its Origin tells it), and can read answers once a name of its own stands for
    127.0.0.1 (DNS rebinding; the Host tells it). Names without a dot cannot be had on the internet, and an address
    is no name: both may be a Host. Pure.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        """allowed: names of --allowed-host."""
        self._allowed = {name.lower() for name in allowed}

    def refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> ErrorInfo | None:
        """Why a request is refused (403), or None."""
        host = ""
        origins = []
        for field, value in headers:
            if field == b"host":
                host = value.decode("latin-1").strip().lower()
            elif field == b"origin":
                origins.append(value.decode("latin-1").strip().lower())
            elif field == b"sec-fetch-site" and value.strip().lower() == b"cross-site":
                return _foreign("a page of another site has sent this request (Sec-Fetch-Site)")
        name = _name(host)
        if not (self._own(name) or is_address(name) or "." not in name.rstrip(".")):
            return _foreign(f"the Host of this request, {name!r}, is no name of this machine")
        for origin in origins:
            _, _, site = origin.partition("://")
            if not site or (site != host and not self._own(_name(site))):
                return _foreign(f"a page of {origin!r} has sent this request (Origin)")
        return None

    def _own(self, name: str) -> bool:
        return is_loopback(name) or name.endswith(".localhost") or name in self._allowed


def site_guard(host: str, allowed: Sequence[str], *, keys: bool) -> SiteGuard | None:
    """The guard of a server bound to this host. keys: whether it asks for API keys. None: none is needed, since pages
    know no key, or since the server is meant for others."""
    return SiteGuard(allowed) if allowed or (is_loopback(host) and not keys) else None


def allowed_methods(routers: Sequence[APIRouter], scope: Scope) -> str:
    """The Allow header of a path; of the server as a whole for `*`."""
    methods = {"OPTIONS"}
    for router in routers:
        for route in router.routes:
            if isinstance(route, Route) and (scope["path"] == "*" or route.matches(scope)[0] is not Match.NONE):
                methods |= route.methods or set()
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


def _name(authority: str) -> str:
    """The host of HOST or HOST:PORT, without a port and brackets."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]


def _foreign(what: str) -> ErrorInfo:
    message = (
        f"{what}, and this server takes none from pages, as it asks for no API key; add --allowed-host NAME for a name "
        "that you use, or --api-key"
    )
    return ErrorInfo(code=FOREIGN_PAGE, message=message, status=403)
