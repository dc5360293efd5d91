"""Receiving request bodies: their size, content coding, share of the memory for all bodies, and structure.

The memory that bodies may take while they are being received is bounded over all connections. A tenant with less than
an equal share of it is let in beyond the limit, as in the queue of prompts. Of content codings (RFC 9110, section 8.4)
gzip and deflate are decoded, in pieces of bounded size; a codec that Python 3.11 does not have (zstd, br) is refused
with the names of those that are taken, which clients read.
"""

import asyncio
import zlib
from collections.abc import Iterator, Sequence

from starlette.requests import ClientDisconnect, Request

from headrace.core.shares import Shares
from headrace.core.stats import Counters, Sample
from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid
from headrace.server.http.structure import MAX_DEPTH, excess, limits, nests_deeper

SILENCE_S = 30.0  # of a client in the middle of its body
SMALL = 1 << 16  # bytes of a body that is looked at in the event loop
BODIES = 8  # of the largest size, half of which has come
LEAST_BYTES = 64 << 20
ACCEPTED = "gzip, deflate"
PIECE = 256 << 10  # bytes decoded in one step; a thousandth of them may have come
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class ContentDecoder:
    """Makes the bytes of a body of those that come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stream = zlib.decompressobj(_WINDOWS[name])

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What a part stands for, in pieces. Raises HeadraceError (400)."""
        piece = b""
        while part or (len(piece) == PIECE and not self._stream.eof):  # after a whole piece more may follow by itself
            if self._stream.eof:
                raise self._broken("something follows its end")
            try:
                piece = self._stream.decompress(part, PIECE)
            except zlib.error as error:
                raise self._broken(str(error)) from error
            yield piece
            part = self._stream.unconsumed_tail or self._stream.unused_data

    def finish(self) -> None:
        """The last part has come. Raises HeadraceError (400)."""
        if not self._stream.eof:
            raise self._broken("it ends too early")

    def _broken(self, why: str) -> HeadraceError:
        return invalid("body", f"the body is no valid {self._name}, which its Content-Encoding names: {why}")


def body_decoder(content_encodings: Sequence[str]) -> ContentDecoder | None:
    """The decoder for the values of Content-Encoding; None for a body as it is. Raises HeadraceError (415)."""
    names = [name.strip().lower() for value in content_encodings for name in value.split(",")]
    match [name for name in names if name not in ("", "identity")]:
        case []:
            return None
        case [name] if name in _WINDOWS:
            return ContentDecoder(name)
        case codings:
            message = (
                f"the body has the Content-Encoding {', '.join(codings)!r}, and what is decoded here is one of "
                f"{ACCEPTED}; send it so, or as it is"
            )
            raise HeadraceError(ErrorInfo(code="unsupported_content_encoding", message=message, status=415))


class BodyBudget:
    """Bytes of bodies of which more is to come, bounded. Used by the event loop only."""

    def __init__(self, max_body_bytes: int) -> None:
        self._limit = max(BODIES * max_body_bytes, LEAST_BYTES)
        self._shares = Shares()  # by name of the API key
        self._counters = Counters()
        self._counters.add("http_bodies_refused_total", 0)

    def check(self, size: int, tenant: str = "") -> None:
        """Raises HeadraceError (503) if a body of this size, of this tenant, does not fit now."""
        if not self._shares.admits(tenant, size, self._limit):
            self._counters.add("http_bodies_refused_total")
            raise refusals.BODIES.raised(used=self._shares.total, limit=self._limit)

    def take(self, size: int, tenant: str = "") -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self.check(size, tenant)
        self._shares.add(tenant, size)

    def give_back(self, size: int, tenant: str = "") -> None:
        """Count no longer what was counted of a body."""
        self._shares.add(tenant, -size)

    def statistics(self) -> tuple[Sample, ...]:
        """Bytes now, and bodies that were refused."""
        return (Sample("http_body_bytes", self._shares.total), *self._counters.snapshot())


class BodyShare:
    """What one body takes of the budget."""

    def __init__(self, budget: BodyBudget, tenant: str = "") -> None:
        self._budget = budget
        self._tenant = tenant
        self._taken = 0

    def take(self, size: int) -> None:
        """Count bytes that have come. Raises HeadraceError (503) if they do not fit."""
        self._budget.take(size, self._tenant)
        self._taken += size

    def give_back(self) -> None:
        """The body is whole, or has ended otherwise."""
        self._budget.give_back(self._taken, self._tenant)
        self._taken = 0


async def read_body(request: Request, limit: int, budget: BodyBudget) -> bytearray:
    """The whole body, decoded. Raises HeadraceError: 413 for one over the limit (without reading it if it declares its
    size) or with too many parts, 415 for a Content-Encoding that is not decoded here, 400 for one that does not hold or
    for nesting, 503 if the budget for bodies that are being received is used up, 408 for one that stalls, 499 if the
    client disconnects."""
    decoder = body_decoder(request.headers.getlist("content-encoding"))
    tenant = request.scope.get("state", {}).get("tenant", "")
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else None
    if size is not None and size > limit:
        raise _too_large(f"the body has {declared} bytes", limit)
    if size is not None and size > SMALL:
        budget.check(size, tenant)
    share = BodyShare(budget, tenant)
    try:
        body = await _received(request, limit, size, share, decoder)
        if len(body) <= SMALL:
            _check_structure(body, limit)
        else:
            await asyncio.to_thread(_check_structure, body, limit)
    finally:
        share.give_back()
    return body


async def _received(
    request: Request, limit: int, size: int | None, share: BodyShare, decoder: ContentDecoder | None
) -> bytearray:
    """The body, held once. size: what it declares. decoder: of its coding. Raises HeadraceError as read_body() does."""
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SILENCE_S) as deadline:
            async for part in request.stream():
                for piece in (part,) if decoder is None else decoder.pieces(part):
                    body += piece
                    if len(body) > limit:
                        raise _too_large("the body is larger", limit)
                    if decoder is not None or len(body) != size:  # more is to come
                        share.take(len(piece))
                    if len(piece) == PIECE:
                        await asyncio.sleep(0)
                deadline.reschedule(loop.time() + SILENCE_S)
        if decoder is not None:
            decoder.finish()
    except ClientDisconnect as error:
        raise HeadraceError(ErrorInfo(code="cancelled", message="the client disconnected", status=499)) from error
    except TimeoutError as error:
        message = f"nothing more of the body has come for {SILENCE_S:g} s"
        raise HeadraceError(ErrorInfo(code="body_timeout", message=message, status=408)) from error
    return body


def _check_structure(body: bytearray, limit: int) -> None:
    """Raises HeadraceError for a body that would take too long, or too deep a stack, to decode."""
    if (over := excess(body, limits(limit))) is not None:
        message = f"the body has more than {over.most} {over.what}, which is the limit; send less in one request"
        raise HeadraceError(ErrorInfo(code="body_too_large", message=message, status=413))
    if nests_deeper(body, MAX_DEPTH):
        message = f"the body is no valid JSON: its lists and objects nest more than {MAX_DEPTH} deep"
        raise HeadraceError(ErrorInfo(code="invalid_json", message=message, status=400))


def _too_large(what: str, limit: int) -> HeadraceError:
    message = f"{what}, and the limit is {limit} bytes (--max-body-bytes)"
    return HeadraceError(ErrorInfo(code="body_too_large", message=message, status=413))
