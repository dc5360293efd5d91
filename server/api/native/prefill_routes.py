"""Headrace's own API: POST /v1/prefill, DELETE /v1/prefill/{rid}, GET /v1/handoff, POST /v1/prefixes, POST
/v1/audits, POST /v1/returns."""

import re
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import Config, KvEventsConfig, ServerConfig
from headrace.core.messages.replies import PrefixReply, Progress, Tokens
from headrace.core.stats import Stats, join
from headrace.core.types.errors import UNKNOWN_RID, ErrorInfo, invalid, shown
from headrace.core.types.kv.geometry import CacheShape
from headrace.core.types.requests.kv_hints import HintAnswer
from headrace.core.types.requests.request import FinishReason, SamplingParams, Usage
from headrace.core.types.requests.resume import Resume
from headrace.core.types.requests.terms import RequestTerms
from headrace.server.api.description.operation import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    GENERATION_HEADERS,
    Parameter,
    described,
)
from headrace.server.api.request.constraint import body_constraint
from headrace.server.api.request.parse import decode_body
from headrace.server.api.request.prompts import check_ids, check_model, encode_any
from headrace.server.api.request.refusal import notify_peers_on_refusal
from headrace.server.api.request.router_headers import with_kv_holder
from headrace.server.api.request.sampling import check_logprobs_start, sampling_params
from headrace.server.api.request.schema import AuditsBody, PrefillBody, PrefixesBody, ReturnsBody
from headrace.server.api.request.terms import base_request, client_of, tenant_of, with_client_terms, with_images
from headrace.server.api.response.hidden_format import DraftReply, HiddenStatesReply, base64_object, draft_object
from headrace.server.api.response.usage import (
    MORE,
    CachedByTier,
    Count,
    Handoff,
    PromiseReport,
    TimingMs,
    bound_ms,
    cached_by_tier,
    handoff_report,
    promise_report,
    timing_report,
)
from headrace.server.frontend.generation.audits import AuditAnswer, computation_key
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.generation.kv_returns import ReturnAnswer
from headrace.server.frontend.link.control_address import ControlAddress, wrong_role
from headrace.server.frontend.request.generation_request import Emit, GenerationDelta, GenerationRequest, discard_events
from headrace.server.frontend.served_model import ServedModel
from headrace.server.frontend.status.stats_collector import StatsCollector
from headrace.server.http.body import BodyBudget, read_body
from headrace.server.http.error_response import error_body
from headrace.server.http.streaming import EventStream, EventWriter, JsonAnswer, json_response, made_aside
from headrace.server.upstream.handoff_params import MAX_TICKET_CHARS, PrefillAddress, PrefixOffer
from headrace.text.logprobs import LogprobEntry, TopLogprob, native_entries, native_entry
from headrace.text.tokenizer import Tokenizer

PROTOCOL_VERSIONS = (1,)
_RID = re.compile(r"[\x21-\x7e]{1,128}")


class FirstToken(msgspec.Struct):
    """The token that follows the prompt."""

    id: int
    text: str
    logprob: float | None
    top_logprobs: list[TopLogprob] | None


class PrefillUsage(msgspec.Struct):
    """Tokens of the prompt."""

    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    cached_tokens_details: CachedByTier = MORE
    """Where some were loaded from a tier."""


class PrefillReply(msgspec.Struct):
    """Of POST /v1/prefill, and the data of the event "done" of its stream."""

    rid: str
    ticket: str | None
    model: str
    first_token: FirstToken | None
    finish_reason: FinishReason | None
    usage: PrefillUsage
    timing_ms: TimingMs
    handoff: Handoff
    lease_s: float | None
    hidden_states: HiddenStatesReply | None
    draft: DraftReply | None
    prompt_logprobs: list[LogprobEntry | None] | None
    kv_hints: tuple[HintAnswer, ...] = MORE
    """What was granted of the request's KV hints, where it had any."""
    promise: PromiseReport = MORE
    """Where a time to first token was promised."""


class PrefillProgress(msgspec.Struct):
    """An event of POST /v1/prefill before "done": bootstrapped, progress or transferring."""

    rid: str
    done: Count
    total: Count
    ttft_bound_ms: float = MORE
    """Where a time to first token was promised."""


class OpenPromptReply(msgspec.Struct):
    """The state of an open prompt."""

    id: str
    ticket: str | None
    """Under which the commit sends or holds the KV."""
    tokens: Count
    """Of the prompt so far."""
    stable: Count
    """Of these, those that are not expected to change by what is appended."""
    computed: Count
    """Of these, those whose KV was computed."""
    expires_s: float
    """Seconds after which it expires unless it changes."""


class Cancelled(msgspec.Struct):
    """Of DELETE /v1/prefill/{rid}."""

    cancelled: Literal[True]


class PrefixesReply(msgspec.Struct):
    """Of POST /v1/prefixes."""

    cached_tokens: Count
    cached_tokens_details: CachedByTier = MORE
    """Where some would be loaded from a tier."""
    load_seconds: float = MORE
    """Predicted seconds of loading those; 0 while nothing was loaded."""


class HandoffReply(msgspec.Struct):
    """Of GET /v1/handoff: where decode servers find this prefill server."""

    protocol: tuple[int, ...]
    instance: str
    control_port: int
    bootstrap_port: int
    model: str
    fingerprint: str | None
    page_size: int
    kv_cache: CacheShape | None
    structured_outputs: bool
    penalties: bool
    hidden_states: bool
    prompt_logprobs_start: bool
    kv_hints: bool
    session_id: bool
    images: bool
    prefixes: bool
    computation: str | None
    """What the bits of its KV depend on beside model and prompt; null where that is more than can be said."""
    resume: bool
    kv_events: dict[str, Any] | None
    load: dict[str, Any] | None


Run = Coroutine[Any, Any, PrefillReply]
Guard = Callable[[Callable[[], Run]], Run]


class PrefillOpener(Protocol):
    """Answers POST /v1/prefill with open."""

    async def respond(self, http: Request, body: PrefillBody) -> Response:
        """The response. Raises HeadraceError."""
        ...


_PREFILL = described(
    "Compute a prompt, and send or hold its KV",
    body=PrefillBody,
    reply=PrefillReply,
    other_replies=(OpenPromptReply,),
    events=(PrefillProgress, PrefillReply),
    errors=GENERATION_ERRORS,
    parameters=GENERATION_HEADERS,
)
_CANCEL = described(
    "End a prefill",
    reply=Cancelled,
    errors=(404,),
    parameters=(Parameter("rid", "path", str, "The id that the request has or was given."),),
)
_HANDOFF = described(
    "Where decode servers find the control endpoint, and what they choose a server by",
    reply=HandoffReply,
    errors=(404, 503),
)


_PREFIXES = described(
    "Leading tokens of a prompt whose KV the prefix cache has",
    body=PrefixesBody,
    reply=PrefixesReply,
    errors=(*BODY_ERRORS, 503),
)
_AUDITS = described(
    "Compute a page of a prompt's KV again, and answer its digest",
    body=AuditsBody,
    reply=AuditAnswer,
    errors=(*BODY_ERRORS, 429, 503),
)
_RETURNS = described(
    "Offer the KV of a turn that this server may fetch back",
    body=ReturnsBody,
    reply=ReturnAnswer,
    errors=(*BODY_ERRORS, 403, 503),
    audience="operators",
)


class PrefillResponder:
    """Makes requests of bodies, and responses of their results."""

    def __init__(self, model: ServedModel, completions: Completions, config: ServerConfig) -> None:
        self._model = model
        self._completions = completions
        self._config = config

    async def request(self, http: Request, body: PrefillBody) -> GenerationRequest:
        """The request that a body stands for. Raises HeadraceError (400, 404)."""
        check_model(self._model, body.model)
        request = await _request(self._model, self._config, client_of(http), body)
        request = with_resume(with_client_terms(request, http, self._config), http, body.resume)
        return with_kv_holder(request, http.headers)

    def respond(self, request: GenerationRequest, *, stream: bool, guard: Guard = lambda run: run()) -> Response:
        """The response, which has the request computed. guard: runs that."""
        model, completions = self._model, self._completions

        def whole(emit: Emit) -> Run:
            return guard(lambda: _prefill(model, completions, request, emit))

        if not stream:
            return JsonAnswer(lambda: whole(discard_events))
        return EventStream(lambda events: _stream(request, events, whole), _write_error)


def prefill_routes(
    responder: PrefillResponder,
    completions: Completions,
    opener: PrefillOpener,
    config: ServerConfig,
    budget: BodyBudget,
    drop: Callable[[str, str], bool],
) -> APIRouter:
    """POST and DELETE of prefills. drop: deletes the open prompt of this id and tenant, if there is one."""
    router = APIRouter()

    @router.post("/v1/prefill", openapi_extra=_PREFILL)
    async def prefill(http: Request) -> Response:
        raw = await read_body(http, config.max_body_bytes, budget)
        async with notify_peers_on_refusal(completions, config, raw):
            body = await decode_body(raw, PrefillBody)
            if body.open:
                return await opener.respond(http, body)
            request = await responder.request(http, body)
        return responder.respond(request, stream=bool(body.stream))

    @router.delete("/v1/prefill/{rid}", openapi_extra=_CANCEL)
    async def cancel(rid: str, http: Request) -> Response:
        tenant = tenant_of(http)
        if not drop(rid, tenant) and not completions.cancel(rid, tenant):
            raise invalid("rid", f"no request {shown(rid)!r} is open", code=UNKNOWN_RID, status=404)
        return json_response(Cancelled(cancelled=True))

    return router


def handoff_routes(model: ServedModel, control: ControlAddress, stats: StatsCollector, config: Config) -> APIRouter:
    """GET /v1/handoff: where decode servers find the control endpoint, and what they choose a server by."""
    router = APIRouter()

    @router.get("/v1/handoff", openapi_extra=_HANDOFF)
    async def handoff() -> Response:
        server = config.server
        if not server.serves_kv:
            raise wrong_role(server.role)
        info = control.require()
        return json_response(
            HandoffReply(
                protocol=PROTOCOL_VERSIONS,
                instance=info.instance,
                control_port=info.control_port,
                bootstrap_port=server.bootstrap_port,
                model=model.name,
                fingerprint=info.stages.fingerprint if info.stages is not None else None,
                page_size=config.engine.page_size,
                kv_cache=info.stages.cache if info.stages is not None else None,
                structured_outputs=True,
                penalties=True,
                hidden_states=True,
                prompt_logprobs_start=True,
                kv_hints=True,
                session_id=True,
                images=model.takes_images,
                prefixes=True,
                computation=computation_key(config, info.stages),
                resume=bool(server.accept_returns) and config.scheduler.prefix_cache,
                kv_events=_kv_events(config.kv_events),
                load=_load(join(await stats.snapshot())),
            )
        )

    return router


def prefix_routes(model: ServedModel, completions: Completions, config: ServerConfig, budget: BodyBudget) -> APIRouter:
    """What the prefix cache has of a prompt, a page of it computed again, and KV that a decode server offers."""
    router = APIRouter()

    @router.post("/v1/prefixes", openapi_extra=_PREFIXES)
    async def prefixes(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), PrefixesBody)
        return json_response(_prefixes(await completions.prefix(_tokens(model, config, http, body))))

    @router.post("/v1/audits", openapi_extra=_AUDITS)
    async def audits(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), AuditsBody)
        request = _tokens(model, config, http, body)
        if not 0 <= body.start < body.end <= len(request.prompt):
            most = f"at most {len(request.prompt)}, the number of tokens"
            raise invalid("end", f"end is {body.end}; it has to be above start, {body.start}, and {most}")
        return JsonAnswer(lambda: completions.audit(request, body.start, body.end))

    @router.post("/v1/returns", openapi_extra=_RETURNS)
    async def returns(http: Request) -> Response:
        body = await decode_body(await read_body(http, config.max_body_bytes, budget), ReturnsBody)
        host = http.client.host if http.client is not None else ""
        address = PrefillAddress("control", host, body.control_port)
        return json_response(await completions.take_return(_tokens(model, config, http, body), address, body.ticket))

    return router


def with_resume(request: GenerationRequest, http: Request, resume: Resume | None) -> GenerationRequest:
    """The request with what its sender has of its KV, at the host that it comes from."""
    if resume is None:
        return request
    host = http.client.host if http.client is not None else ""
    address = PrefillAddress("control", host, resume.control_port)
    return msgspec.structs.replace(request, resume=PrefixOffer(address, resume.ticket, resume.tokens))


def _prefixes(found: PrefixReply | None) -> PrefixesReply:
    if found is None:
        return PrefixesReply(0)
    held, in_tiers = found.pool.held, found.pool.in_tiers
    by_tier = cached_by_tier([Usage(held, 0, held, in_tiers)])
    return PrefixesReply(held, by_tier, found.load_s if in_tiers.total else MORE)


def _tokens(
    model: ServedModel, config: ServerConfig, http: Request, body: PrefixesBody | AuditsBody
) -> GenerationRequest:
    """A prompt without an answer. Raises HeadraceError (400)."""
    check_model(model, body.model)
    check_ids(body.prompt_token_ids, "prompt_token_ids", model.vocab_size)
    terms = RequestTerms(cache_salt=(body.cache_salt or "") if isinstance(body, PrefixesBody) else "")
    request = GenerationRequest(
        rid="", prompt=tuple(body.prompt_token_ids), sampling=SamplingParams(), terms=terms, model=body.model or ""
    )
    return with_client_terms(request, http, config)


def _kv_events(config: KvEventsConfig) -> dict[str, Any] | None:
    """Where KV events are published, None if they are not."""
    if not config.port:
        return None
    return {"port": config.port, "replay_port": config.replay_port, "topic": config.topic}


def _load(stats: Stats) -> dict[str, Any] | None:
    """The work that waits, and what tokens cost; None before the scheduler has said so. trusted: they are seconds.
    wait_seconds, delayed_requests: of prompts of so many uncached tokens."""
    values = {(sample.name, *sample.labels): sample.value for sample in stats.samples}
    fields = {
        "queued_seconds": ("unplanned_seconds",),
        "seconds_per_squared_token": ("prefill_cost_seconds", "squared_token"),
        "seconds_per_token": ("prefill_cost_seconds", "token"),
    }
    found = {field: values.get(key) for field, key in fields.items()}
    if None in found.values():
        return None
    trusted = bool(values.get(("cost_model_trusted",)))
    waits, delayed = (
        {key[1]: value for key, value in values.items() if key[0] == name}
        for name in ("predicted_wait_seconds", "delayed_requests")
    )
    return {**found, "trusted": trusted, "wait_seconds": waits, "delayed_requests": delayed}


async def _request(model: ServedModel, config: ServerConfig, client: str, body: PrefillBody) -> GenerationRequest:
    """The prompt, tokenized and checked. Raises HeadraceError (400) for a body that cannot be served in this role."""
    ticket = _ticket(config, body)
    if body.rid is not None and not _RID.fullmatch(body.rid):
        raise invalid("rid", "rid has to have 1 to 128 printable ASCII characters without spaces")
    constraint = await body_constraint(model, client, body)
    if body.prompt_only:
        constraint = None
    sampling = sampling_params(body, logprobs=body.logprobs, max_tokens=16, vocab_size=model.vocab_size)
    sampling = msgspec.structs.replace(sampling, hidden_states=body.hidden_states, draft_top_k=body.draft_top_k or 0)
    prompt, images = await encode_any(model, body)
    check_logprobs_start(sampling, [prompt])
    if sampling.hidden_states is not None:
        model.hidden.check("hidden_states", len(prompt) if sampling.hidden_states == "all" else 1)
    rid = body.rid or f"pf-{secrets.token_hex(16)}"
    base = with_images(base_request(rid, body, sampling, constraint, progress=bool(body.stream)), images)
    hold = body.handoff == "hold"
    return msgspec.structs.replace(
        base,
        prompt=prompt,
        ticket=ticket,
        hold=hold,
        cached_only=bool(body.cached_only),
        prompt_only=body.prompt_only,
        adapter=body.adapter,
    )


def _ticket(config: ServerConfig, body: PrefillBody) -> str | None:
    """The ticket under which a peer fetches the KV, None if it is dropped. Raises HeadraceError (400)."""
    if body.cached_only and body.handoff is not None:
        raise invalid("cached_only", "cached_only hands KV over under a ticket; leave handoff out")
    if body.handoff not in (None, "none", "hold"):
        raise invalid("handoff", f'handoff is {shown(body.handoff)!r}; it has to be "hold", "none" or left out')
    if body.handoff == "none":
        if body.ticket is not None:
            raise invalid("ticket", 'a ticket and handoff "none" contradict each other; send one of them')
        return None
    if config.role != "prefill" and not (body.cached_only and config.serves_kv):
        message = f'this server has role {config.role} and sends no KV; send handoff "none" or ask a prefill server'
        raise invalid("ticket", message, code="wrong_role")
    if body.ticket is None:
        message = 'ticket is required: the name under which a decode peer fetches the KV (or handoff "none")'
        raise invalid("ticket", message, code="missing_field")
    if not 1 <= len(body.ticket) <= MAX_TICKET_CHARS:
        raise invalid("ticket", f"ticket has {len(body.ticket)} characters; 1 to {MAX_TICKET_CHARS} are allowed")
    return body.ticket


async def _prefill(
    model: ServedModel, completions: Completions, request: GenerationRequest, emit: Emit
) -> PrefillReply:
    """Run the request; returns the response, for a prompt alone as if no token had been chosen."""
    first, result = await completions.prefill(request, emit)
    usage = result.usage
    completed = 0 if request.prompt_only else usage.completion_tokens
    return PrefillReply(
        rid=request.rid,
        ticket=request.ticket,
        model=model.called(request.model),
        first_token=None if request.prompt_only else _first_token(model.tokenizer, first),
        finish_reason=result.finish_reason,
        usage=PrefillUsage(usage.prompt_tokens, completed, usage.cached_tokens, cached_by_tier([usage])),
        timing_ms=timing_report(result.timing, decode=False),
        handoff=handoff_report(result),
        lease_s=result.lease_s,
        prompt_logprobs=await made_aside(
            lambda: native_entries(model.tokenizer, result.prompt_logprobs), len(result.prompt_logprobs)
        ),
        hidden_states=await base64_object(result.hidden),
        draft=draft_object(first.draft),
        kv_hints=result.hints or MORE,
        promise=promise_report(result.promise),
    )


def _first_token(tokenizer: Tokenizer, first: Tokens) -> FirstToken:
    if first.logprobs:
        return FirstToken(**msgspec.structs.asdict(native_entry(tokenizer, first.logprobs[0])))
    token = first.tokens[0]
    return FirstToken(token, tokenizer.piece(token), None, None)


async def _stream(request: GenerationRequest, events: EventWriter, whole: Callable[[Emit], Run]) -> None:
    """Events: bootstrapped, progress {done, total}, transferring, done (the response)."""

    async def emit(event: Progress | GenerationDelta) -> None:
        if isinstance(event, Progress):
            name = "progress" if event.phase == "computing" else event.phase
            await events.data(PrefillProgress(request.rid, event.done, event.total, bound_ms(event)), name)

    await events.data(await whole(emit), "done")


async def _write_error(events: EventWriter, info: ErrorInfo) -> None:
    """The error event has the status, since the head of the response was sent before."""
    body = error_body(info)
    body.error.status = info.status
    await events.data(body, "error")
