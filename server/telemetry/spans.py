"""What the event loop hands over of a request whose spans are recorded. Built into spans by otlp_sink.py.

request                          ServedSpan
├─ bootstrap, queue, fetch …     RequestTraced of the scheduler: phases
│  └─ prefill chunk              and chunks
└─ POST /v1/prefill              CalledSpan; the prefill server's request is its child
"""

from collections.abc import Callable

import msgspec

from headrace.core.messages.replies import RequestTraced
from headrace.core.types.requests.request import SamplingParams, Usage


class ServedSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An HTTP request that was answered. No text of prompts, completions or error messages is in it."""

    traceparent: str
    tracestate: str
    parent_id: str
    """Id of the client's span; "" if the trace begins here."""
    route: str
    """Template of the path."""
    status: int
    start: float
    """Of the machine's monotonic clock, as is the end."""
    end: float
    request_id: str
    rid: str = ""
    """Of its first prompt; "" if none was admitted."""
    prompts: int = 0
    """Prompts and choices that were admitted."""
    sampling: SamplingParams | None = None
    """Of its first prompt."""
    usages: tuple[Usage, ...] = ()
    """Of those that ended well."""
    finish_reasons: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    """Why its prompts were computed where they were, if that was compared."""
    first_token_s: float | None = None
    """From the admission of a prompt to the first token."""
    error: str = ""
    """Code of what it failed with."""


class CalledSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A call to a prefill server."""

    traceparent: str
    tracestate: str
    parent_id: str
    url: str
    """Of the server."""
    start: float
    end: float
    error: str = ""
    """Code of the error response, or of the connection's end; "cancelled" if it was given up."""


AnySpan = ServedSpan | CalledSpan | RequestTraced
RecordSpan = Callable[[AnySpan], None]
