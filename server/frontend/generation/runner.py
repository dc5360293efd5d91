"""From a tokenized request to text: the prompt is computed here, or its KV is fetched from a prefill server.

local:     Submit ─────────────────────────────────────────────► Tokens ... RequestFinished
compared:  Submit(ticket) ─► PrefillDecided: as local, or as remote from here on
remote:    Submit(ticket) ─► Reserved ─► POST /v1/prefill there ─► Tokens ... RequestFinished
                                              └─ refused or failed: Abort with its error ─► RequestFailed
            RequestFailed by a prefill server: again at another one, see prefill_failover.py
posted:    Submit(ticket), a router has sent the prompt there ───► Tokens ... RequestFinished
preempted: Tokens ... Reserved(its ticket) ─► POST /v1/prefill there, of all tokens so far ─► Tokens ... RequestFinished
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial

import msgspec

from headrace.core.config.server import Remote
from headrace.core.messages.frontend import Submit
from headrace.core.messages.replies import (
    Held,
    HiddenPart,
    LogprobPart,
    Progress,
    Promised,
    RequestFinished,
    Reserved,
    Tokens,
)
from headrace.core.runtime.clock import Clock
from headrace.core.types import packed
from headrace.core.types.errors import NONFINITE, ErrorInfo, HeadraceError
from headrace.core.types.requests.request import (
    AnyRoute,
    DecodeHere,
    Discard,
    FetchFrom,
    PromptPosting,
    SamplingParams,
    SendTo,
)
from headrace.server.frontend.generation.audits import PageAudit, PrefillAudits
from headrace.server.frontend.generation.follower import CallFollower, FirstTokenForbidden, end_tokens, note_promise
from headrace.server.frontend.generation.hedge import Hedges, Run
from headrace.server.frontend.generation.kv_returns import KvReturns
from headrace.server.frontend.generation.prefill_body import prefill_body, with_prefill_response
from headrace.server.frontend.generation.prefill_failover import PrefillFailover, PromptServers, remaining
from headrace.server.frontend.generation.prefix_fetch import PrefixFetches
from headrace.server.frontend.generation.refetch import Refetch
from headrace.server.frontend.generation.results import (
    PromptParts,
    finish_reason,
    held_result,
    result_of,
)
from headrace.server.frontend.generation.resume import ResumeFetches, ResumeOffer
from headrace.server.frontend.link.call import Call
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
)
from headrace.server.frontend.request.request_context import CallSpan
from headrace.server.frontend.served_model import ServedModel
from headrace.server.routing.failover import client_error
from headrace.server.telemetry.prometheus import FrontMetrics
from headrace.server.telemetry.spans import RecordSpan
from headrace.server.upstream.handoff_params import KvSource, PrefillAddress
from headrace.server.upstream.prefill_call import PrefillProgress, PrefillResponse, posted_error
from headrace.server.upstream.prefill_pool import PrefillChoice, PrefillPool
from headrace.server.upstream.prefill_server import PrefillServer

log = logging.getLogger(__name__)

FEW_LOGPROBS = 256  # positions of a prompt whose logprobs are made ours on the event loop; more take a thread
RETRYABLE = (429, 502, 503, 504)  # statuses of a prefill server after which computing the prompt here can help


class GenerationRunner:
    """Runs requests from their submission to the scheduler until their end.

    prefills: None unless this is a decode server. local: compute prompts here if no prefill server can. remote: which
    prompts go to a prefill server. fetches: of a prefill server with siblings. returns: of a decode server that offers
    KV. audits: of one that audits prefill servers. resumes: of a prefill server that takes KV back. hedges: of a decode
    server that starts second prefill servers.
    """

    def __init__(
        self,
        client: SchedulerClient,
        model: ServedModel,
        prefills: PrefillPool | None,
        metrics: FrontMetrics,
        clock: Clock,
        *,
        local: bool = False,
        remote: Remote = "always",
        fetches: PrefixFetches | None = None,
        returns: KvReturns | None = None,
        audits: PrefillAudits | None = None,
        resumes: ResumeFetches | None = None,
        hedges: Hedges | None = None,
        record_span: RecordSpan = lambda _span: None,
    ) -> None:
        self._client = client
        self._model = model
        self._prefills = prefills
        self._clock = clock
        self._failover = PrefillFailover(prefills, metrics, clock) if prefills is not None else None
        self._local = local
        self._remote = remote
        self._fetches = fetches
        self._returns = returns
        self._audits = audits
        self._resumes = resumes
        self._hedges = hedges
        self._record_span = record_span

    async def complete(self, request: GenerationRequest, emit: Emit) -> GenerationResult:
        """Continue the prompt to its end on this server. Raises HeadraceError; cancelling it cancels the request."""
        pool, source = self._prefills, request.kv_source
        if pool is None or self._is_own(request):
            return await self._compute_here(request, emit)
        begun, arrived = False, self._clock.now()

        async def watch(event: Progress | GenerationDelta) -> None:
            nonlocal begun
            begun = begun or isinstance(event, GenerationDelta)
            await emit(event)

        try:
            if source is not None:
                return await self._fetch_posted(request, watch, pool, source)
            if request.prefill_at is not None:
                return await self._prefill_at(request, watch, pool, request.prefill_at)
            return await self._prefill_anywhere(request, arrived, watch, lambda: begun)
        except FirstTokenForbidden:
            log.info("%s: the first token would end the text before min_tokens; sampling it again", request.rid)
        except HeadraceError as error:
            if begun or not self._local or not _is_retryable(error.info):
                raise
            log.warning("%s: computing the prompt here, since %s", request.rid, error.info.message)
        left = remaining(request, self._clock.now() - arrived)
        again = msgspec.structs.replace(left, rid=f"{request.rid}-local")
        return await self._compute_here(again, emit, follows=request.rid)

    def _is_own(self, request: GenerationRequest) -> bool:
        """The prompt is computed here, whatever prefill servers there are: the client or the configuration says so."""
        if request.terms.uncached_limit is not None:
            return True
        if request.kv_source is not None:
            return request.kv_source.address is None
        return request.prefill_at is None and self._remote == "never"

    async def prefill(self, request: GenerationRequest, emit: Emit) -> tuple[Tokens, GenerationResult]:
        """Compute the prompt and send its KV under the request's ticket, or drop it if there is no ticket.

        Returns the first token, and the result: finish_reason if the request ended with that token, lease_s if the KV
        is held for a peer. Raises HeadraceError; cancelling it cancels the request.
        """
        first: Tokens | None = None
        if request.cached_only:
            first = Tokens(rid=request.rid, tokens=())
        else:
            await self._bring_prefix(request)
        parts = PromptParts(len(request.prompt))
        submit = _submit(request, await self._merge_stops(request), _outgoing_route(request))
        async with self._client.open(submit) as call:
            while True:
                event = await call.next()
                if isinstance(event, Tokens) and first is None:
                    first = event
                elif isinstance(event, HiddenPart | LogprobPart):
                    parts.add(event)
                elif isinstance(event, Promised):
                    note_promise(request, event)
                elif isinstance(event, Progress):
                    await emit(event)
                elif isinstance(event, Held):
                    call.keep()
                    break
                elif isinstance(event, RequestFinished):
                    break
        if first is None or not (first.tokens or request.cached_only):
            message = f"request {request.rid} ended without a first token"
            raise HeadraceError(ErrorInfo(code="internal_error", message=message, status=500))
        states = parts.hidden(len(request.prompt))
        if isinstance(event, Held):
            return first, held_result(event, states, parts.logprobs)
        reason, generated = finish_reason(event.reason), event.usage.completion_tokens
        result = result_of(event, reason, generated, states, parts.logprobs)
        return first, msgspec.structs.replace(result, lease_s=0.0 if request.hold else None)

    async def _bring_prefix(self, request: GenerationRequest) -> None:
        """Fetch what other servers have of a prompt that is to be computed here."""
        offer, resumes = request.resume, self._resumes
        if offer is not None and resumes is not None and await resumes.bring(request, offer):
            return
        if self._fetches is not None:
            await self._fetches.bring(request)

    async def _prefill_anywhere(
        self, request: GenerationRequest, arrived: float, emit: Emit, has_begun: Callable[[], bool]
    ) -> GenerationResult:
        """Have a prefill server compute the prompt, and another one if that refuses or fails it."""
        pool, failover = self._prefills, self._failover
        assert pool is not None, "only a decode server has prompts computed elsewhere"
        assert failover is not None, "only a decode server has prompts computed elsewhere"
        sampling = await self._merge_stops(request)

        async def attempt(left: GenerationRequest, choice: PrefillChoice, servers: PromptServers) -> GenerationResult:
            moved = bool(servers.attempts.failures)

            def run(follows: str) -> Run:
                return lambda one, chosen, lane: self._prefill_remotely(
                    one, lane, pool, chosen, sampling, moved=moved, follows=follows
                )

            if self._hedges is None:
                return await run("")(left, choice, emit)
            return await self._hedges.run(left, choice, servers, emit, run(""), run(left.rid))

        return await failover.run(request, arrived, has_begun, attempt)

    async def _prefill_remotely(
        self,
        request: GenerationRequest,
        emit: Emit,
        pool: PrefillPool,
        choice: PrefillChoice,
        sampling: SamplingParams,
        *,
        moved: bool,
        follows: str = "",
    ) -> GenerationResult:
        """Reserve pages here, have the chosen prefill server compute the prompt, and continue from its KV; or compute
        it here, if the scheduler finds that this costs less. sampling: with all stop tokens. moved: another server has
        refused or failed it. follows: rid under which another server is late with it."""
        ticket, url = secrets.token_hex(16), choice.server.url
        span = CallSpan(request.context, url, self._clock, self._record_span)
        compares = self._remote == "cost" and request.prefill_at is None and not follows
        route = FetchFrom(url, ticket, forecast=pool.forecast(choice) if compares else None, compare=compares)
        audit = None if self._audits is None else self._audits.draw(request, choice.server)
        submit = _submit(request, sampling, route, moved=moved, follows=follows, audit=audit)
        handoff, goes_on = _HandoffTime(self._clock), moved or bool(follows)
        body = prefill_body(
            request,
            ticket,
            knows_start=choice.server.knows_logprobs_start,
            knows_hints=choice.server.knows_hints,
            knows_session_id=choice.server.knows_session_id,
        )
        async with (
            self._client.open(submit) as call,
            pool.prefill_call(choice, body, span) as prefill,
            self._refetch(pool, choice.server, request, call) as refetch,
            ResumeOffer(self._client, choice.server, request) as offer,
        ):

            def on_progress(progress: PrefillProgress) -> None:
                call.deliver(Progress(rid=call.rid, phase=progress.phase, done=progress.done, total=progress.total))

            def on_reserved(reserved: Reserved, generated: list[int]) -> None:
                if reserved.ticket:
                    refetch.post(reserved, generated)
                else:
                    handoff.posted()
                    prefill.start(on_progress, call.abort, offer.make(reserved.cached) if goes_on else None)

            on_kept, watch = partial(pool.withdraw, choice), handoff.watching(emit)
            follower = CallFollower(self._model, call, request, watch, on_reserved=on_reserved, on_kept=on_kept)
            try:
                result = await follower.run()
            except HeadraceError as error:
                raise HeadraceError(await prefill.cause(error.info)) from error
            self._arrived(call, audit)
            if call.decision is not None:
                result = msgspec.structs.replace(result, prefill=call.decision.reason)
            if not call.fetches:
                return result
            result = msgspec.structs.replace(result, peer=url)
            if self._returns is not None:
                self._returns.offer(choice.server, request.prompt, follower.generated, request.terms)
            response = await prefill.response()
            if response is not None and (added_s := handoff.added_s(response)) is not None:
                pool.handed_over(choice, added_s)
            if response is None or len(response.prompt_logprobs or ()) <= FEW_LOGPROBS:
                return with_prefill_response(request, result, response)
            return await asyncio.to_thread(with_prefill_response, request, result, response)

    async def _prefill_at(
        self, request: GenerationRequest, emit: Emit, pool: PrefillPool, address: PrefillAddress
    ) -> GenerationResult:
        """Have the prefill server compute the prompt that a router has chosen. Raises HeadraceError: 403 if it is not
        allowed, else as a client is told it: the router may choose another one."""
        async with pool.connected(address) as server:
            with pool.chosen_by_router(server, request.prompt, request.needs) as choice:
                try:
                    sampling = await self._merge_stops(request)
                    return await self._prefill_remotely(request, emit, pool, choice, sampling, moved=False)
                except HeadraceError as error:
                    raise HeadraceError(client_error(error.info)) from error

    async def _fetch_posted(
        self, request: GenerationRequest, emit: Emit, pool: PrefillPool, source: KvSource
    ) -> GenerationResult:
        """Fetch the KV of a prompt that a router has sent to a prefill server, and continue from it.

        Raises FirstTokenForbidden if min_tokens forbids the first token; all but the last page of the prompt are in the
        prefix cache then.
        """
        assert source.address is not None, "there is nothing to fetch"
        forbidden: frozenset[int] = frozenset()
        if source.held and request.sampling.min_tokens:
            forbidden = frozenset((await self._merge_stops(request)).stop_token_ids)
        async with pool.connected(source.address) as server:
            posting: PromptPosting = "external" if source.wait else "done"
            route = FetchFrom(server.url, source.ticket, posting)
            audit = None if self._audits is None else self._audits.draw(request, server)
            submit = _submit(request, await self._merge_stops(request), route, audit=audit)
            try:
                async with self._client.open(submit) as call, self._refetch(pool, server, request, call) as refetch:

                    def on_reserved(reserved: Reserved, generated: list[int]) -> None:
                        if reserved.ticket:
                            refetch.post(reserved, generated)

                    follower = CallFollower(
                        self._model, call, request, emit, on_reserved=on_reserved, forbidden=forbidden
                    )
                    result = await follower.run()
                    self._arrived(call, audit)
                    return msgspec.structs.replace(result, peer=server.url)
            except HeadraceError as error:
                raise HeadraceError(posted_error(error.info)) from error

    async def _compute_here(self, request: GenerationRequest, emit: Emit, *, follows: str = "") -> GenerationResult:
        """follows: rid under which prefill servers have failed it."""
        submit = _submit(request, await self._merge_stops(request), DecodeHere(), follows=follows)
        async with self._client.open(submit) as call:
            return await CallFollower(self._model, call, request, emit).run()

    def _refetch(self, pool: PrefillPool, server: PrefillServer, request: GenerationRequest, call: Call) -> Refetch:
        return Refetch(pool, server, request, call, self._clock, self._record_span)

    async def _merge_stops(self, request: GenerationRequest) -> SamplingParams:
        """Adds every token id that ends the text by itself to stop_token_ids: EOS, and tokens that contain a stop
        string, so that a prompt whose first token ends it is not sent to a peer. With min_tokens set the latter are
        left to the text, since the engine would never sample such a token before min_tokens."""
        ids = dict.fromkeys((*request.sampling.stop_token_ids, *end_tokens(self._model, request)))
        if request.stop and request.sampling.min_tokens == 0:
            ids |= dict.fromkeys(await self._model.tokens.stop_ids(request.stop))
        return msgspec.structs.replace(request.sampling, stop_token_ids=tuple(ids))

    def _arrived(self, call: Call, audit: PageAudit | None) -> None:
        """A call has ended well. audit: of the KV that it was to fetch."""
        if self._audits is not None and audit is not None and call.fetches:
            self._audits.ended(audit)


class _HandoffTime:
    """What a handoff takes beside the prefill server's own time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._posted_at: float | None = None
        self._took_s: float | None = None

    def posted(self) -> None:
        """The prompt leaves for the prefill server."""
        self._posted_at = self._clock.now()

    def watching(self, emit: Emit) -> Emit:
        """Note when the first token comes."""

        async def watch(event: Progress | GenerationDelta) -> None:
            if isinstance(event, GenerationDelta) and self._took_s is None and self._posted_at is not None:
                self._took_s = self._clock.now() - self._posted_at
            await emit(event)

        return watch

    def added_s(self, response: PrefillResponse) -> float | None:
        """Seconds from the prompt's posting to its first token, less those that the prefill server has had it queued
        and computed it; None where either is not known."""
        own_s = response.own_s
        return None if self._took_s is None or own_s is None else self._took_s - own_s


def _submit(
    request: GenerationRequest,
    sampling: SamplingParams,
    route: AnyRoute,
    *,
    moved: bool = False,
    follows: str = "",
    audit: PageAudit | None = None,
) -> Submit:
    constraint = request.constraint
    if constraint is not None:
        sampling = msgspec.structs.replace(sampling, grammar=constraint.key)
    return Submit(
        rid=request.rid,
        prompt=packed.pack(request.prompt),
        sampling=sampling,
        constraint=constraint,
        route=route,
        terms=request.terms,
        images=tuple(image.input for image in request.images),
        progress=request.progress,
        traceparent=request.context.parent,
        moved=moved,
        audit=None if audit is None else audit.share,
        follows=follows,
    )


def _is_retryable(error: ErrorInfo) -> bool:
    """Whether the prompt may be computed here after this error of the prefill server."""
    return error.status in RETRYABLE or error.code == NONFINITE


def _outgoing_route(request: GenerationRequest) -> AnyRoute:
    """Where the KV of a prompt that is only computed here goes."""
    return SendTo(request.ticket, request.hold, request.cached_only) if request.ticket else Discard()
