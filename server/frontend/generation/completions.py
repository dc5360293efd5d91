"""Admission of requests, and notification of peers when a request with a ticket is refused."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from headrace.core.messages.frontend import RefuseTicket, ReleaseTicket
from headrace.core.messages.replies import PrefixReply, Progress, Tokens
from headrace.core.runtime.clock import Clock
from headrace.core.types import refusals
from headrace.core.types.errors import MODEL_NOT_FOUND, ErrorInfo, HeadraceError
from headrace.core.types.packed import pack
from headrace.core.types.requests.adapters import adapter_mismatch
from headrace.core.types.requests.kv_hints import GivenHint, HintAnswer, Prefetch
from headrace.core.types.requests.request import SamplingParams
from headrace.core.types.requests.tenants import tenant_salt
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.frontend.generation.audits import AuditAnswer, PageAuditor
from headrace.server.frontend.generation.kv_returns import ReturnAnswer, ReturnTaker
from headrace.server.frontend.generation.prefix_fetch import QUERY_S, PrefixFetches
from headrace.server.frontend.generation.runner import GenerationRunner
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    RequestObserver,
)
from headrace.server.frontend.request.hidden_states import HiddenLimits
from headrace.server.frontend.request.kv_hints import (
    NOT_COME,
    SHARED,
    answers,
    refused,
    request_answers,
    without_grants,
)
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.telemetry.prometheus import FrontMetrics, TokenTimes
from headrace.server.upstream.handoff_params import KvSource, PrefillAddress
from headrace.server.upstream.prefill_pool import PrefillPool


class Completions:
    """Runs the requests of all routes, if the server is ready for them.

    prefills: the prefill servers of a decode server. max_open: requests at the same time; more are refused with 429.
    hidden: bounds the hidden states of all of them. adapters: names of --lora. share_prefixes: tenants find each
    other's cached prefixes. fetches: of a prefill server with siblings. taker: of a prefill server that takes KV back.
    auditor: of a prefill server.
    """

    def __init__(
        self,
        client: SchedulerClient,
        runner: GenerationRunner,
        readiness: Readiness,
        prefills: PrefillPool | None,
        metrics: FrontMetrics,
        clock: Clock,
        *,
        max_open: int,
        hidden: HiddenLimits,
        adapters: Collection[str] = (),
        share_prefixes: bool = False,
        fetches: PrefixFetches | None = None,
        taker: ReturnTaker | None = None,
        auditor: PageAuditor | None = None,
    ) -> None:
        self._client = client
        self._runner = runner
        self._readiness = readiness
        self._prefills = prefills
        self._metrics = metrics
        self._clock = clock
        self._max_open = max_open
        self._hidden = hidden
        self._adapters = adapters
        self._share_prefixes = share_prefixes
        self._fetches = fetches
        self._taker = taker
        self._auditor = auditor

    @property
    def open_requests(self) -> int:
        """Requests between submission and their end."""
        return self._client.open_calls

    async def complete(self, request: GenerationRequest, emit: Emit) -> GenerationResult:
        """Continue a prompt to its end on this server. Raises HeadraceError: 503 or 429 if it cannot start, or what it
        failed with. Cancelling this coroutine cancels the request."""
        generated = request.sampling.max_tokens
        self._admit(request, generated)
        request = self.own(request)
        with self._hidden.taken(request, generated), _observed(request) as observer:
            times = TokenTimes(self._metrics, self._clock)
            result = await self._runner.complete(request, _timed(emit, times, observer))
            times.ended(result.usage)
            observer.ended(result)
        return _with_answers(request, result)

    async def prefill(self, request: GenerationRequest, emit: Emit) -> tuple[Tokens, GenerationResult]:
        """Compute a prompt and send or hold its KV; returns the first token and the result. Raises HeadraceError as
        complete() does. Cancelling this coroutine cancels the request."""
        started = self._clock.now()
        self._admit(request, 0)
        request = self.own(request)
        with self._hidden.taken(request, 0), _observed(request) as observer:
            first, result = await self._runner.prefill(request, emit)
            if request.cached_only:
                observer.ended(result)
                return first, result
            first_token_s = self._clock.now() - started - result.timing.transfer_s
            self._metrics.observe_first_token(first_token_s)
            self._metrics.observe_end(self._clock.now() - started, result.usage)
            observer.first_token(first_token_s)
            observer.ended(result)
        return first, _with_answers(request, result)

    async def hint(
        self, prompt: tuple[int, ...], terms: RequestTerms, hints: Sequence[GivenHint], model: str
    ) -> list[HintAnswer]:
        """What of the hints for a prompt's KV was granted, once what siblings have of it has come, if it is to be
        prefetched. terms: with tenant and salt. model: as the client names it. Raises HeadraceError (503) if the
        scheduler is not ready, or does not answer."""
        if self._share_prefixes:
            return answers(refused(hints, SHARED), ())
        actions = tuple(hint.action for hint in hints if hint.action is not None)
        plain = GenerationRequest(rid="", prompt=prompt, sampling=SamplingParams(), terms=terms, model=model)
        own, came = self.own(plain), True
        if self._fetches is not None and any(isinstance(action, Prefetch) for action in actions):
            came = await self._fetches.prefetch(own)
        results = await self._client.hint(pack(prompt), own.terms, actions) if actions else ()
        return answers(hints, results, "" if came else NOT_COME)

    async def prefix(self, request: GenerationRequest) -> PrefixReply | None:
        """What the prefix cache has of a prompt, for its client; None if that is not known in time. Raises
        HeadraceError (503)."""
        if (problem := self._readiness.engine_not_ready()) is not None:
            raise HeadraceError(problem)
        return await self._client.query_prefix(pack(request.prompt), self.own(request).terms, QUERY_S)

    async def take_return(self, request: GenerationRequest, address: PrefillAddress, ticket: str) -> ReturnAnswer:
        """Take KV of a prompt that the decode server with this control endpoint offers under a ticket, or say why not.
        Raises HeadraceError: 403 if KV of that server is not taken, 503."""
        if (problem := self._readiness.refusal()) is not None:
            raise HeadraceError(problem)
        if self._taker is None:
            text = "this server takes no KV back: its operator can add --accept-return HOST"
            raise HeadraceError(ErrorInfo(code="wrong_role", message=text, status=403))
        return await self._taker.take(address, request.prompt, ticket, self.own(request).terms)

    async def audit(self, request: GenerationRequest, start: int, end: int) -> AuditAnswer:
        """Compute a prompt's KV at positions [start, end) again. Raises HeadraceError: 400 in another role, 503, and as
        PageAuditor does."""
        if (problem := self._readiness.refusal()) is not None:
            raise HeadraceError(problem)
        if self._auditor is None:
            text = "this server computes no pages for audits: ask one with role prefill"
            raise HeadraceError(ErrorInfo(code="wrong_role", message=text, status=400))
        return await self._auditor.answer(request.prompt, start, end, request.terms.tenant)

    def cancel(self, rid: str, tenant: str) -> bool:
        """Cancel an open or held request of a tenant, "" for any; False if there is none with this id."""
        return self._client.cancel(rid, tenant)

    def refuse_tickets(self, tickets: Iterable[str], error: ErrorInfo) -> None:
        """Prompts under these tickets will not be computed: decode peers that reserve for them get this error."""
        for ticket in tickets:
            self._client.post(RefuseTicket(ticket=ticket, error=error))

    def release_sources(self, sources: Iterable[KvSource], reason: str) -> None:
        """No request will fetch KV from these sources: prefill servers that are connected free it."""
        for source in sources:
            server = self._prefills.find(source.address) if self._prefills and source.address else None
            if server is not None:
                self._client.post(ReleaseTicket(prefill=server.url, ticket=source.ticket, reason=reason))

    def own(self, request: GenerationRequest) -> GenerationRequest:
        """The request with its adapter, and with cached prefixes that are its tenant's own. Everything behind this has
        the same salt: prefill servers, which get it in the body, their events, and the choice among them."""
        terms = request.terms
        salt = terms.cache_salt if self._share_prefixes else tenant_salt(terms.tenant, terms.cache_salt)
        own = msgspec.structs.replace(terms, cache_salt=salt, adapter=self._adapter(request))
        request = msgspec.structs.replace(request, terms=own)
        return without_grants(request) if self._share_prefixes else request

    def _adapter(self, request: GenerationRequest) -> str:
        """The fingerprint of a request's adapter, "" for none. They are known when the stages have been ready."""
        info = self._client.server_info
        return info.stages.adapters.get(request.model, "") if info is not None and info.stages is not None else ""

    def _admit(self, request: GenerationRequest, generated: int) -> None:
        """Raises HeadraceError (503, 429) if the request cannot start now, after notifying the peer of its ticket.
        generated: tokens that it may generate here beside the first one of a prefill."""
        error = self._refusal(request, generated)
        if error is None:
            return
        self.refuse_tickets([request.ticket] if request.ticket else [], error)
        self.release_sources([request.kv_source] if request.kv_source else [], error.message)
        if request.observer is not None:
            request.observer.refused(error)
        raise HeadraceError(error)

    def _refusal(self, request: GenerationRequest, generated: int) -> ErrorInfo | None:
        alone = request.kv_source is not None or bool(request.sampling.label_token_ids)  # scores are computed here
        problem = self._readiness.engine_not_ready() if alone else self._readiness.refusal()
        if problem is not None:
            return problem
        if self._client.open_calls >= self._max_open:
            return refusals.OPEN_REQUESTS.error(most=self._max_open)
        if request.model in self._adapters and not self._adapter(request):
            text = f"the stages of this server have no adapter {request.model!r}"
            return ErrorInfo(code=MODEL_NOT_FOUND, message=text, status=404, field="model")
        if request.adapter is not None and request.adapter != (own := self._adapter(request)):
            text = adapter_mismatch(prefill=own, decode=request.adapter)
            return ErrorInfo(code=MODEL_NOT_FOUND, message=text, status=404, field="adapter")
        return self._hidden.refusal(request, generated)


def _timed(emit: Emit, times: TokenTimes, observer: RequestObserver) -> Emit:
    """Observe when tokens come."""

    async def watch(event: Progress | GenerationDelta) -> None:
        if isinstance(event, GenerationDelta) and (first_token_s := times.came(len(event.tokens))) is not None:
            observer.first_token(first_token_s)
        await emit(event)

    return watch


class _NoObserver:
    """Of prompts that no HTTP request has brought."""

    def began(self, rid: str, sampling: SamplingParams) -> None:
        pass

    def promised(self, bound_s: float) -> None:
        pass

    def first_token(self, seconds: float) -> None:
        pass

    def ended(self, result: GenerationResult) -> None:
        pass

    def failed(self, error: ErrorInfo) -> None:
        pass

    def refused(self, error: ErrorInfo) -> None:
        pass


@contextmanager
def _observed(request: GenerationRequest) -> Iterator[RequestObserver]:
    """The observer of an admitted request, which sees it begin, and fail."""
    observer = request.observer or _NoObserver()
    observer.began(request.rid, request.sampling)
    try:
        yield observer
    except HeadraceError as error:
        observer.failed(error.info)
        raise


def _with_answers(request: GenerationRequest, result: GenerationResult) -> GenerationResult:
    if not request.hints:
        return result
    return msgspec.structs.replace(result, hints=request_answers(request, result))
