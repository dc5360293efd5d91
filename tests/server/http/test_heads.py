"""What is done with each rare head: the rows of the table in docs/operations.md, at each application of the project."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.server.http.protocol import HEAD_BYTES, PIPELINED
from tests.server.http.apps import NAMES, all_apps, answers, talk

HOST = b"Host: localhost\r\n"
BODY = b'{"model": 5, "max_tokens": "many"}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LAST = b"GET /health HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n"  # after a request, and answered by itself
INNER = b"GET /ready HTTP/1.1\r\nHost: inner\r\n\r\n"


def get(headers: bytes = b"", target: bytes = b"/health", version: bytes = b"1.1", method: bytes = b"GET") -> bytes:
    return method + b" " + target + b" HTTP/" + version + b"\r\n" + HOST + headers + b"\r\n"


def post(headers: bytes = LENGTH, body: bytes = BODY, target: bytes = b"/v1/completions") -> bytes:
    return get(headers, target, method=b"POST") + body


def coded(name: bytes, body: bytes) -> bytes:
    return post(b"Content-Encoding: %s\r\nContent-Length: %d\r\n" % (name, len(body)), body)


Check = Callable[[bytes, Callable[..., bytes]], None]


@dataclass(frozen=True)
class Case:
    """What is sent, and what has to come."""

    row: str
    parts: tuple[bytes, ...]
    check: Check


def served_as(plain: bytes) -> Check:
    """As a plain request, and the next request of the connection by itself."""

    def check(came: bytes, ask: Callable[..., bytes]) -> None:
        method = plain.split()[0].decode()
        expected = answers(ask(plain, LAST), method)
        found = [each for each in answers(came, method) if each.status >= 200]
        assert [each.same for each in found] == [each.same for each in expected]
        assert len(found) == 2, "the connection goes on"

    return check


def closed(*statuses: int, says: str = "", **headers: str) -> Check:
    """One answer with one of these statuses, and the end of the connection."""

    def check(came: bytes, _ask: Callable[..., bytes]) -> None:
        [answer] = answers(came)
        assert answer.status in statuses
        assert answer.headers["connection"] == "close"
        assert says in answer.body.decode()
        assert all(answer.headers[name.replace("_", "-")] == value for name, value in headers.items())

    return check


def open_after(status: int, method: str = "GET", says: str = "", without: str = "", **headers: str) -> Check:
    """An answer with this status, after which the connection goes on. without: a header that is not there."""

    def check(came: bytes, _ask: Callable[..., bytes]) -> None:
        first, last = answers(came, method)
        assert (first.status, last.status) == (status, 200)
        assert says in first.body.decode()
        assert without not in first.headers
        assert all(value in first.headers[name.replace("_", "-")] for name, value in headers.items())

    return check


def each(row: str, check: Check, *requests: bytes) -> list[Case]:
    return [Case(row, (request,), check) for request in requests]


def head_of(path: bytes) -> Check:
    def check(came: bytes, ask: Callable[..., bytes]) -> None:
        first, _ = answers(came, "HEAD")
        [whole, _] = answers(ask(get(target=path), LAST))
        assert first.status == whole.status
        assert {*first.headers} >= {*whole.headers} - {"transfer-encoding"}
        if path != b"/metrics":  # whose length changes
            assert first.headers["content-length"] == whole.headers["content-length"] == str(len(whole.body))

    return check


def old_client(came: bytes, _ask: Callable[..., bytes]) -> None:
    [answer] = answers(came)
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert "transfer-encoding" not in answer.headers


def continued(came: bytes, ask: Callable[..., bytes]) -> None:
    interim, *rest = answers(came)
    [plain, _] = answers(ask(post(), LAST))
    if plain.status != 404:  # who reads the body asks for it
        assert interim.status == 100
        assert [each.status for each in rest] == [plain.status, 200]
    else:
        assert interim.status == 404
        assert interim.headers["connection"] == "close", "nobody knows whether the body comes"


def in_order(came: bytes, _ask: Callable[..., bytes]) -> None:
    assert [each.status for each in answers(came)] == [200, 404] * 5 + [200]


def two_heads(came: bytes, _ask: Callable[..., bytes]) -> None:
    """The answer to the good request comes before the refusal of the next one."""
    assert [each.status for each in answers(came)] == [200, 400]


UPGRADES = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n",
)
# Rows that have several cases.
ELSEWHERE = "a Host or an Origin of elsewhere, on loopback without keys"
CODINGS = "Transfer-Encoding with another coding than chunked, with chunked twice, or of HTTP/1.0"
EXTENSIONS = "chunk extensions and trailers"
LONG = "a request target or headers above 64 KiB"
IGNORED = "Range, Accept, Accept-Encoding, If-Match and the like"
OTHER_CODING = "another Content-Encoding, or several"
BROKEN = "a coded body that is broken, or larger than it may be"
DEEP = "lists and objects that nest deeper than 128"
NO_TARGET = "a target that is neither path nor URL"
URL = "a URL as the target"
UPGRADE = "an offered upgrade"
TOO_LARGE = 1 + (1 << 16)  # all_apps has this limit of bodies

CASES = [
    Case("HTTP/1.0", (get(version=b"1.0"), LAST), old_client),
    Case("HTTP/1.0", (b"GET /health HTTP/1.0\r\n\r\n",), old_client),
    Case("HTTP/1.0", (get(b"Connection: keep-alive\r\n", version=b"1.0"), LAST),
         open_after(200, connection="keep-alive")),
    *each("HTTP/0.9, HTTP/1.2, HTTP/2.0", closed(505, says="HTTP/1.1"), get(version=b"0.9"), get(version=b"1.2"),
          get(version=b"2.0"), b"GET /health\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    *each("a TLS handshake", closed(400, says="TLS"), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    Case("empty lines before a request", (b"\r\n\r\n" + get(), LAST), served_as(get())),
    *each("lines that end with LF, folded lines, a space before a colon, NUL", closed(400, says="no valid HTTP"),
          b"GET /health HTTP/1.1\nHost: x\n\n", get(b"A: b\nC: d\r\n"), get(b"A: b\r\n c\r\n"), get(b"A : b\r\n"),
          get(b"A: b\0c\r\n"), get(b"A: b\rC: d\r\n")),
    *each("no Host, two of them, or none that could be one", closed(400, says="Host"), b"GET /health HTTP/1.1\r\n\r\n",
          get(b"Host: x\r\n"), b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n",
          b"GET /health HTTP/1.1\r\nHost: a@b\r\n\r\n"),
    *each("two Authorization headers", closed(400, says="Authorization"), get(b"Authorization: Bearer a\r\n" * 2)),
    Case(URL, (get(target=b"http://localhost:1/health"), LAST), served_as(get())),
    Case(URL, (get(target=b"http://localhost?x"), LAST), served_as(get(target=b"/?x"))),
    Case(URL, (get(target=b"http://pages.example/health"), LAST), open_after(403)),
    *each(NO_TARGET, closed(400, says="target"), get(target=b"*"), get(target=b"/health#x"),
          get(target=b"ftp://localhost/"), get(target=b"http://a@b/"), get(target=b"http:///health")),
    *each(NO_TARGET, closed(400), get(target=b"health"), get(target=b"/h\xc3\xa9")),
    Case("`OPTIONS *`", (get(target=b"*", method=b"OPTIONS"), LAST), open_after(204, allow="GET, HEAD, OPTIONS")),
    Case("`OPTIONS` of a path", (get(b"Origin: http://localhost\r\nAccess-Control-Request-Method: POST\r\n",
         method=b"OPTIONS"), LAST), open_after(204, allow="GET, HEAD, OPTIONS", without="access-control-allow-origin")),
    *[Case("HEAD", (get(target=path, method=b"HEAD"), LAST), head_of(path))
      for path in (b"/health", b"/ready", b"/metrics", b"/v1/models", b"/nothing", b"/health/")],
    *[Case("another method than a path has", (get(method=method), LAST), open_after(405, allow="GET, HEAD, OPTIONS"))
      for method in (b"POST", b"PUT", b"DELETE", b"PATCH", b"TRACE", b"QUERY")],
    *each("CONNECT, and methods that are not known", closed(501), get(target=b"localhost:1", method=b"CONNECT"),
          get(method=b"NONSENSE"), get(method=b"get")),
    Case("a slash at the end of a path", (get(target=b"/health/"), LAST), served_as(get())),
    Case("a slash at the end of a path", (post(target=b"/v1/completions/"), LAST), served_as(post())),
    Case("a slash at the end of a path", (get(target=b"/health//"), LAST), open_after(404, without="location")),
    Case("`Connection: close`", (get(b"Connection: close\r\n") + get(),), closed(200)),
    Case("`Connection: close`", (get(b"Connection: keep-alive, close\r\n") + get(),), closed(200)),
    Case("requests before answers", ((get() + get(target=b"/nothing")) * 5 + LAST,), in_order),
    Case("requests before answers", (get() + get(b"Host: x\r\n") + get(),), two_heads),
    Case("requests before answers", (get() * (PIPELINED + 50),), lambda came, _: None),
    *[Case(UPGRADE, parts, served_as(post())) for offer in UPGRADES for parts in (
        (post(offer + LENGTH), LAST),
        (post(offer + LENGTH) + LAST,),
        (get(offer + LENGTH, b"/v1/completions", method=b"POST"), BODY[:5], BODY[5:], LAST),
        (get(offer + CHUNKED, b"/v1/completions", method=b"POST"), CHUNKS[:3], CHUNKS[3:] + LAST),
        (post(offer + CHUNKED, CHUNKS) + LAST,),
    )],
    *[Case(UPGRADE, parts, served_as(get())) for offer in UPGRADES for parts in (
        (get(offer), LAST), (get(offer) + LAST,), (get(offer + b"Content-Length: 0\r\n") + LAST,))],
    *[Case(UPGRADE, parts, served_as(post(b"Content-Length: %d\r\n" % len(INNER), INNER))) for parts in (
        (get(UPGRADES[0] + b"Content-Length: %d\r\n" % len(INNER), b"/v1/completions", method=b"POST"), INNER, LAST),
        (post(UPGRADES[0] + b"Content-Length: %d\r\n" % len(INNER), INNER) + LAST,))],
    Case("`Expect: 100-continue`", (get(b"Expect: 100-continue\r\n" + LENGTH, b"/v1/completions", method=b"POST"),
         BODY, LAST), continued),
    Case("another Expect", (post(b"Expect: miracles\r\n" + LENGTH),), closed(417)),
    *each("Content-Length: twice, a list, signed, in hexadecimal, beyond 64 bits", closed(400, says="Content-Length"),
          post(LENGTH * 2), post(b"Content-Length: 5, 5\r\n"), post(b"Content-Length: +5\r\n"),
          post(b"Content-Length: -5\r\n"), post(b"Content-Length: 0x5\r\n"),
          post(b"Content-Length: 99999999999999999999\r\n")),
    *each("Content-Length beside Transfer-Encoding", closed(400, says="Transfer-Encoding"),
          post(LENGTH + CHUNKED, CHUNKS),
          post(CHUNKED + LENGTH, CHUNKS)),
    *each(CODINGS,
          closed(400, says="Transfer-Encoding"), post(b"Transfer-Encoding: identity, chunked\r\n", CHUNKS),
          post(b"Transfer-Encoding: identity\r\n" + CHUNKED, CHUNKS),
          post(b"Transfer-Encoding: chunked, gzip\r\n", CHUNKS),
          post(CHUNKED * 2, CHUNKS), post(b"Transfer-Encoding: xchunked\r\n", CHUNKS),
          get(CHUNKED, b"/v1/completions", b"1.0", b"POST") + CHUNKS),
    *each(CODINGS, closed(501),
          post(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKS)),
    Case(EXTENSIONS, (post(CHUNKED, b'2;a=b;c="d"\r\n{}\r\n0;e\r\nAuthorization: x\r\nHost: y\r\n\r\n'),
         LAST), served_as(post(b"Content-Length: 2\r\n", b"{}"))),
    Case(EXTENSIONS, (post(CHUNKED, CHUNKS[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n") + LAST,),
         served_as(post())),
    *each("chunks that are none", lambda came, _: broken_body(came), post(CHUNKED, b"0x1\r\nx\r\n0\r\n\r\n"),
          post(CHUNKED, b"1\r\nxx\r\n0\r\n\r\n"), post(CHUNKED, b"-1\r\nx"), post(CHUNKED, b"1\nx\r\n0\r\n\r\n"),
          post(CHUNKED, b"fffffffffffffffff\r\nx")),
    *[Case("`Content-Encoding: gzip`, `deflate`, `identity`", (request, LAST), served_as(post())) for request in (
        coded(b"gzip", gzip.compress(BODY)), coded(b"X-GZip", gzip.compress(BODY)),
        coded(b"deflate", zlib.compress(BODY)),
        coded(b"identity", BODY), coded(b"identity, gzip", gzip.compress(BODY)))],
    Case(LONG, (get(target=b"/" + b"x" * HEAD_BYTES),), closed(414)),
    Case(LONG, (get(b"A: " + b"x" * HEAD_BYTES + b"\r\n"),), closed(431)),
    *[Case(IGNORED, (get(headers), LAST), served_as(get())) for headers in (
        b"Range: bytes=0-3\r\n", b"Accept: text/html;q=0.1\r\n", b"Accept-Encoding: gzip, identity;q=0\r\n",
        b'If-Match: "x"\r\n',
        b"If-None-Match: *\r\n", b"TE: trailers\r\n", b"Max-Forwards: 0\r\n")],
    Case("a body that no route asks for", (get(LENGTH) + BODY, LAST), served_as(get())),
    Case("a body that no route asks for", (get(CHUNKED) + CHUNKS, LAST), served_as(get())),
    Case(ELSEWHERE, (b"GET /health HTTP/1.1\r\nHost: pages.example\r\n\r\n",
         LAST), open_after(403, says="pages.example")),
    *[Case(ELSEWHERE, (get(headers), LAST), open_after(403))
      for headers in (b"Origin: http://pages.example\r\n", b"Origin: null\r\n", b"Sec-Fetch-Site: cross-site\r\n")],
    *[Case(ELSEWHERE, (request, LAST), served_as(get())) for request in (
        get(b"Origin: http://localhost:3000\r\n"), get(b"Origin: http://[::1]\r\nSec-Fetch-Site: same-origin\r\n"),
        b"GET /health HTTP/1.1\r\nHost: 10.0.0.5:8000\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: decode\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a.localhost\r\n\r\n")],
]  # fmt: skip
BODIES = [  # of applications that read bodies
    *[Case(OTHER_CODING, (coded(name, BODY), LAST), open_after(415, "POST", name.decode(),
           accept_encoding="gzip"))
      for name in (b"zstd", b"br", b"gzip, deflate", b"compress")],
    *[Case(BROKEN, (coded(b"gzip", body), LAST), open_after(status, "POST"))
      for status, body in ((400, BODY), (400, gzip.compress(BODY)[:-1]), (400, gzip.compress(BODY) + b"x"),
                           (400, gzip.compress(BODY) * 2), (413, gzip.compress(bytes(TOO_LARGE))),
                           (413, gzip.compress(bytes(1 << 26))))],
    Case(DEEP, (post(b"Content-Length: 16000\r\n", b"[" * 16000), LAST), open_after(413, "POST")),
    *[Case(DEEP, (post(b"Content-Length: %d\r\n" % len(body), body), LAST),
           open_after(400, "POST", "deep")) for body in (b"[" * 129, b'{"prompt":' * 900 + b"1" + b"}" * 900)],
    Case("an empty body", (post(b"Content-Length: 0\r\n", b""), LAST), open_after(400, "POST", "empty")),
]  # fmt: skip
TIMED = ("half a head", "no request", "a body that is answered before it is whole", "a client that closes its side")


def broken_body(came: bytes) -> None:
    """Whoever reads the body, or answers without it, the connection ends and nothing is taken for a request."""
    found = answers(came)
    assert len(found) <= 2
    assert found[-1].status in (400, 404)


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    with all_apps(max_body_bytes=TOO_LARGE - 1) as found:
        yield found


def ids(cases: list[Case]) -> list[str]:
    return [f"{case.row} {number}" for number, case in enumerate(cases)]


@pytest.mark.parametrize("app", NAMES)
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_each_head(case: Case, app: str, ports: dict[str, int]) -> None:
    case.check(talk(ports[app], *case.parts), lambda *parts: talk(ports[app], *parts))


@pytest.mark.parametrize("app", [name for name in NAMES if name != "bootstrap"])
@pytest.mark.parametrize("case", BODIES, ids=ids(BODIES))
def test_each_body(case: Case, app: str, ports: dict[str, int]) -> None:
    case.check(talk(ports[app], *case.parts), lambda *parts: talk(ports[app], *parts))


def test_the_table_has_these_rows() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    table = page.partition("## HTTP: what is done with rare heads")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \|$", table, re.MULTILINE)[1:]
    tested = dict.fromkeys([*(case.row for case in (*CASES, *BODIES)), *TIMED])
    assert sorted(rows) == sorted(tested)
