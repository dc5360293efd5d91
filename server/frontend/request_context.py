"""Ids by which other servers know an HTTP request: X-Request-Id, and traceparent of W3C Trace Context."""

import re
import secrets
from collections.abc import Iterable

import msgspec

REQUEST_ID_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
_NAMES = tuple(name.encode() for name in (REQUEST_ID_HEADER, TRACEPARENT_HEADER, TRACESTATE_HEADER))
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


class RequestContext(msgspec.Struct, frozen=True):
    """The ids of an HTTP request that other servers know it by."""

    request_id: str
    """X-Request-Id, made up here if the client sent none that can be used."""

    traceparent: str = ""
    """As in W3C Trace Context; "" if the client sent none."""

    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """The trace's id of 32 hexadecimal digits, "" without a trace."""
        return self.traceparent[3:35]

    def headers(self) -> dict[str, str]:
        """Headers with which a request goes on to another server."""
        values = {
            REQUEST_ID_HEADER: self.request_id,
            TRACEPARENT_HEADER: self.traceparent,
            TRACESTATE_HEADER: self.tracestate,
        }
        return {name: value for name, value in values.items() if value}


def read_context(headers: Iterable[tuple[bytes, bytes]]) -> RequestContext:
    """The context that the headers of a request name. An id with spaces, other than ASCII, or of over 128 characters is
    replaced; a traceparent that is none is left out, with its tracestate."""
    found = {name: value.decode("latin-1") for name, value in headers if name in _NAMES}
    request_id, traceparent, tracestate = (found.get(name, "") for name in _NAMES)
    traced = _TRACEPARENT.fullmatch(traceparent) is not None
    return RequestContext(
        request_id=request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(16),
        traceparent=traceparent if traced else "",
        tracestate=tracestate if traced and _TRACESTATE.fullmatch(tracestate) else "",
    )
