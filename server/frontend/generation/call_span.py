"""A call to a prefill server as a part of the request's trace."""

from headrace.core.runtime.clock import Clock
from headrace.server.frontend.request.request_context import RequestContext
from headrace.server.telemetry.spans import CalledSpan, RecordSpan


class CallSpan:
    """The CallObserver of one call: a span between those of the two servers, if the request's are recorded."""

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
