"""Pages for people: one file each, with no data, and nothing loaded from another place.

Texts of clients and peers reach the document as text nodes only; should that fail, the policy lets no script but the
page's own run, and nothing be loaded from or sent to another place.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response

from headrace.server.api.description.operation import HTML


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
