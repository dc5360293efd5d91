"""The head of an HTTP request: what RFC 9110 and 9112 ask of it beyond what the parser has checked. Pure."""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from headrace.core.types.errors import ErrorInfo, HeadraceError

Headers = list[tuple[bytes, bytes]]
"""Names in lower case, and values."""

BAD_REQUEST = "bad_request"
# An authority without userinfo, which RFC 9110, section 4.2.4, has taken for an error.
_AUTHORITY = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)
_ONCE = frozenset((b"host", b"authorization"))  # the parser has refused a second Content-Length
_LISTS = frozenset((b"connection", b"transfer-encoding", b"expect"))
_WATCHED = _ONCE | _LISTS | {b"content-length"}


@dataclass(frozen=True, slots=True)
class Head:
    """A request without its body."""

    method: str
    version: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    keep_alive: bool
    """Whether the client may send another request on the connection."""
    expects_continue: bool
    framing: bytes
    """The header that says where the body ends, as a line; empty: there is no body."""


def read_head(method: bytes, version: str, target: bytes, headers: Headers) -> Head:
    """Checks a head. Raises HeadraceError: 400, 417, 501 or 505."""
    if version not in ("1.0", "1.1"):
        raise refused(505, f"HTTP/{version} is not spoken here: send HTTP/1.1", code="http_version_not_supported")
    if method == b"CONNECT":
        raise refused(501, "CONNECT is not served: this is no proxy", code="not_implemented")
    found = _watched(headers)
    authority, path = _target(method, target)
    host = found.get(b"host")
    if host is None and version == "1.1":
        raise refused(400, "a request of HTTP/1.1 has to have a Host header")
    if host is not None and not _AUTHORITY.fullmatch(host):
        raise refused(400, "the Host header is no host with an optional port")
    if authority is not None:  # counts, whatever the header says: RFC 9112, section 3.2.2
        headers = [(b"host", authority), *((name, value) for name, value in headers if name != b"host")]
    raw_path, _, query = path.partition(b"?")
    connection = _tokens(found.get(b"connection", b""))
    return Head(
        method=method.decode("ascii"),
        version=version,
        path=unquote(raw_path.decode("ascii")),
        raw_path=raw_path,
        query=query,
        headers=headers,
        keep_alive=b"close" not in connection and (version == "1.1" or b"keep-alive" in connection),
        expects_continue=version == "1.1" and _expects_continue(found.get(b"expect")),
        framing=_framing(version, found),
    )


def refused(status: int, message: str, code: str = BAD_REQUEST) -> HeadraceError:
    """The error of a request that is not passed on to the application."""
    return HeadraceError(ErrorInfo(code=code, message=message, status=status))


def _watched(headers: Headers) -> dict[bytes, bytes]:
    """The headers that are looked at here. Those of a list are joined."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _WATCHED:
            if name in found and name in _ONCE:
                raise refused(400, f"the header {name.decode().capitalize()} is there twice")
            found[name] = found[name] + b"," + value if name in found else value
    return found


def _target(method: bytes, target: bytes) -> tuple[bytes | None, bytes]:
    """Authority, if the target has one, and path with query. RFC 9112, section 3.2."""
    if not target.isascii() or b"#" in target:
        raise refused(400, "the request target has a fragment, or characters beyond ASCII")
    if target.startswith(b"/"):
        return None, target
    if target == b"*" and method == b"OPTIONS":
        return None, target
    if (absolute := _ABSOLUTE.fullmatch(target)) is None:
        raise refused(400, "the request target is neither a path nor an http:// URL")
    authority, path = absolute.groups()
    if authority[:1] in (b"", b":") or not _AUTHORITY.fullmatch(authority):
        raise refused(400, "the request target is a URL without a valid host")
    if not path and method == b"OPTIONS":
        return authority, b"*"  # of the server as a whole: section 3.2.4
    return authority, path if path.startswith(b"/") else b"/" + path


def _expects_continue(value: bytes | None) -> bool:
    if value is None:
        return False
    if value.strip().lower() != b"100-continue":
        raise refused(417, "nothing is expected here but 100-continue", code="expectation_failed")
    return True


def _framing(version: str, found: dict[bytes, bytes]) -> bytes:
    """Where the body ends. The parser has refused a length beside a coding, and `chunked` that is not the last one."""
    if (codings := found.get(b"transfer-encoding")) is not None:
        names = _tokens(codings)
        if version == "1.0":
            raise refused(400, "Transfer-Encoding is not of HTTP/1.0")
        if b"identity" in names or names.count(b"chunked") != 1 or b"" in names:
            raise refused(400, "Transfer-Encoding is not chunked")
        if names != [b"chunked"]:
            raise refused(501, "of Transfer-Encoding, chunked alone is understood", code="not_implemented")
        return b"transfer-encoding: chunked\r\n"
    length = found.get(b"content-length", b"0").strip()
    return b"content-length: %s\r\n" % length if length.strip(b"0") else b""


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
