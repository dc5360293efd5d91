"""KV that is fetched a second time: what a preempted request has had so far is posted to its prefill server again.

The scheduler asks for it (Reserved with a ticket), and has the KV computed here where the prefill server refuses.
"""

from types import TracebackType
from typing import Self

from headrace.core.messages.replies import Reserved
from headrace.core.runtime.clock import Clock
from headrace.server.frontend.generation.prefill_body import refetch_body
from headrace.server.frontend.link.call import Call
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.frontend.request.request_context import CallSpan
from headrace.server.telemetry.spans import RecordSpan
from headrace.server.upstream.prefill_call import PrefillCall
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer


class Refetch:
    """The prompts that one call has posted again, as an async context: leaving it with an exception cancels them."""

    def __init__(
        self,
        pool: PrefillPool,
        server: PrefillServer,
        request: GenerationRequest,
        call: Call,
        clock: Clock,
        record_span: RecordSpan,
    ) -> None:
        self._pool = pool
        self._server = server
        self._request = request
        self._call = call
        self._clock = clock
        self._record_span = record_span
        self._posted: PrefillCall | None = None  # the last one: those before it have been answered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._posted is not None:
            await self._posted.__aexit__(kind, error, traceback)

    def post(self, reserved: Reserved, generated: list[int]) -> None:
        """Post the tokens whose pages the scheduler has reserved. generated: all that were reported so far."""
        tokens = (*self._request.prompt, *generated)[: reserved.tokens]
        span = CallSpan(self._request.context, self._server.url, self._clock, self._record_span)
        body = refetch_body(self._request, reserved.ticket, tokens, knows_start=self._server.knows_logprobs_start)
        self._posted = self._pool.refetch_call(self._server, body, span)
        self._posted.start(lambda _progress: None, self._call.abort)
