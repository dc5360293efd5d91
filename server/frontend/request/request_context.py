"""Ids by which other servers know an HTTP request: X-Request-Id, and traceparent of W3C Trace Context. With them, the
span of a call to a prefill server."""

import random
import re
import secrets
from collections.abc import Iterable

import msgspec

from headrace.core.runtime.clock import Clock
from headrace.server.telemetry.spans import CalledSpan, RecordSpan

REQUEST_ID_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"
TRACESTATE_HEADER = "tracestate"
SAMPLED = 1  # flag of a traceparent
_NAMES = tuple(name.encode() for name in (REQUEST_ID_HEADER, TRACEPARENT_HEADER, TRACESTATE_HEADER))
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}")


class RequestContext(msgspec.Struct, frozen=True):
    """The ids of an HTTP request that other servers know it by."""

    request_id: str
    """X-Request-Id, made up here if the client sent none that can be used."""

    traceparent: str = ""
    """As in W3C Trace Context: the span whose children the spans of other servers are. The client's, or that of this
    server if it records spans of this request; "" without a trace."""

    tracestate: str = ""

    parent_id: str = ""
    """Id of the client's span, if this server records spans."""

    recorded: bool = False
    """This server records spans of it."""

    @property
    def trace_id(self) -> str:
        """The trace's id of 32 hexadecimal digits, "" without a trace."""
        return self.traceparent[3:35]

    @property
    def parent(self) -> str:
        """traceparent of the scheduler's spans; "" if none are recorded."""
        return self.traceparent if self.recorded else ""

    def child(self) -> "RequestContext":
        """The context of a span below that of this server."""
        traceparent = f"{self.traceparent[:36]}{_new_id(64):016x}{self.traceparent[52:]}"
        return msgspec.structs.replace(self, traceparent=traceparent, parent_id=self.traceparent[36:52])

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


class TraceSampler:
    """Chooses the requests whose spans are recorded: as their header says, and a share of those without one."""

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * (1 << 64))  # as TraceIdRatioBased of OpenTelemetry: the lower half of the id

    def sample(self, context: RequestContext) -> RequestContext:
        """The context with a span of this server, if it is recorded. A trace that begins here and is not recorded has
        an id, too: other servers do not record it either."""
        if not context.traceparent:
            trace = _new_id(128)
            recorded = trace & ((1 << 64) - 1) < self._bound
            traceparent = f"00-{trace:032x}-{_new_id(64):016x}-0{recorded:d}"
            return RequestContext(context.request_id, traceparent, recorded=recorded)
        if not int(context.traceparent[53:], 16) & SAMPLED:
            return context
        return msgspec.structs.replace(context.child(), recorded=True)


class CallSpan:
    """The CallObserver of one call to a prefill server, as a part of the request's trace: a span between those of the
    two servers, if the request's are recorded."""

    def __init__(self, context: RequestContext, url: str, clock: Clock, record: RecordSpan) -> None:
        self._context = context.child() if context.recorded else context
        self._url = url
        self._clock = clock
        self._record = record
        self._began = 0.0

    def headers(self) -> dict[str, str]:
        """Ids of the request, and of this span."""
        return self._context.headers()

    def began(self) -> None:
        """The prompt is sent."""
        self._began = self._clock.now()

    def ended(self, error: str) -> None:
        """The call is over."""
        context = self._context
        if context.recorded:
            now = self._clock.now()
            self._record(
                CalledSpan(
                    traceparent=context.traceparent,
                    tracestate=context.tracestate,
                    parent_id=context.parent_id,
                    url=self._url,
                    start=self._began,
                    end=now,
                    error=error,
                )
            )


def _new_id(bits: int) -> int:
    return random.getrandbits(bits) or 1  # all zeros is no id
