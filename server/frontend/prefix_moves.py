"""KV of the leading tokens of a prompt, from the prefix cache of another server into that of this one.

    Submit(FetchFrom.prefix) ─► Reserved ─► POST /v1/prefill there, cached_only ─► RequestFinished

It gives way to requests that need its pages or its metadata row. Nothing waits for it that could not go on without.
"""

import asyncio
import logging
import secrets
from typing import Literal

import msgspec

from headrace.core.messages.frontend import Submit
from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.messages.replies import RequestFinished, Reserved
from headrace.core.runtime.clock import Clock
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.requests.kv_hints import Retain
from headrace.core.types.requests.request import FetchFrom, SamplingParams
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.request_context import CallSpan, RequestContext
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.spans import RecordSpan
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)


class PrefixMove(msgspec.Struct, frozen=True):
    """How the fetch of a prefix has ended."""

    result: Literal["fetched", "failed", "late"]
    seconds: float
    error: ErrorInfo | None = None
    """What it failed with."""


class PrefixMoves:
    """Fetches prefixes from the servers of a pool. page_size: tokens of a page here."""

    def __init__(
        self,
        client: SchedulerClient,
        pool: PrefillPool,
        metrics: FrontMetrics,
        clock: Clock,
        page_size: int,
        record_span: RecordSpan,
    ) -> None:
        self.page_size = page_size
        self._client = client
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._record_span = record_span

    async def fetch(
        self,
        server: PrefillServer,
        tokens: tuple[int, ...],
        terms: RequestTerms,
        context: RequestContext,
        *,
        source: Literal["sibling", "open"],
        within_s: float,
        retain: Retain | None = None,
        spare: bool = False,
    ) -> PrefixMove:
        """Have the KV of these tokens, whole pages that the server has cached, sent here. terms: of their request.
        source: label of the metrics. retain: keep it here as this says. spare: see FetchFrom. Raises no HeadraceError:
        what does not come is counted and logged."""
        began, tokens_moved, move = self._clock.now(), 0, PrefixMove("late", 0.0)
        level = logging.DEBUG if source == "open" else logging.INFO
        try:
            async with asyncio.timeout(within_s):
                done = await self._move(server, tokens, terms, context, retain, spare)
            move, tokens_moved = PrefixMove("fetched", 0.0), done.handoff.pages * self.page_size
        except TimeoutError:
            log.log(level, "a prefix of %d tokens did not come from %s in time", len(tokens), server.url)
        except HeadraceError as error:
            move = PrefixMove("failed", 0.0, error.info)
            text = error.info.message
            log.log(level, "a prefix of %d tokens does not come from %s: %s", len(tokens), server.url, text)
        took_s = self._clock.now() - began
        self._metrics.count_prefix_fetch(source, move.result, tokens_moved, took_s)
        return msgspec.structs.replace(move, seconds=took_s)

    async def _move(
        self,
        server: PrefillServer,
        tokens: tuple[int, ...],
        terms: RequestTerms,
        context: RequestContext,
        retain: Retain | None,
        spare: bool,
    ) -> RequestFinished:
        """Raises HeadraceError."""
        ticket = secrets.token_hex(16)
        submit = Submit(
            rid=f"prefix-{ticket}",
            prompt=pack(tokens),
            sampling=SamplingParams(max_tokens=1),
            route=FetchFrom(server.url, ticket, prefix=True, spare=spare),
            terms=RequestTerms(tenant=terms.tenant, cache_salt=terms.cache_salt, retain=retain),
        )
        body = PrefillRequest(
            rid=f"prefix-{ticket}",
            prompt_token_ids=tokens,
            ticket=ticket,
            cached_only=True,
            cache_salt=terms.cache_salt or None,
        )
        span = CallSpan(context, server.url, self._clock, self._record_span)
        async with self._client.open(submit) as call, self._pool.refetch_call(server, body, span) as posted:
            while not isinstance(event := await call.next(), RequestFinished):
                if isinstance(event, Reserved):
                    posted.start(lambda _progress: None, call.abort)
        return event
