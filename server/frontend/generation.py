"""From a tokenized request to text: the prompt is computed here, or its KV is fetched from a prefill server.

local:     Submit ─────────────────────────────────────────────► Tokens ... RequestFinished
remote:    Submit(ticket) ─► Reserved ─► POST /v1/prefill there ─► Tokens ... RequestFinished
                                              └─ refused or failed: Abort with its error ─► RequestFailed
posted:    Submit(ticket), a router has sent the prompt there ───► Tokens ... RequestFinished
"""

import json
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.core.messages.frontend import Held, Progress, RequestFinished, Reserved, Submit, Tokens
from headrace.core.types import packed
from headrace.core.types.constraint import Constraint
from headrace.core.types.errors import GRAMMAR_REJECTED, NONFINITE, ErrorInfo, HeadraceError
from headrace.core.types.request import (
    AnyRoute,
    DecodeHere,
    Discard,
    FetchFrom,
    FinishReason,
    PromptPosting,
    SamplingParams,
    SendTo,
    Timing,
)
from headrace.server.frontend.generation_request import Emit, GenerationDelta, GenerationRequest, GenerationResult
from headrace.server.frontend.scheduler_client import Call, SchedulerClient
from headrace.server.frontend.served_model import ServedModel
from headrace.server.tokenizer.detokenizer import TextStream
from headrace.server.upstream.handoff_params import KvSource
from headrace.server.upstream.prefill_call import PrefillProgress, PrefillResponse, client_error
from headrace.server.upstream.prefill_pool import PrefillPool

log = logging.getLogger(__name__)

RETRYABLE = (429, 502, 503, 504)  # statuses of a prefill server after which computing the prompt here can help


class FirstTokenForbidden(Exception):
    """The prefill server, which did not know the client's min_tokens, sampled a first token that ends the text."""


class GenerationRunner:
    """Runs requests from their submission to the scheduler until their end.

    prefills: None unless this is a decode server. local: compute prompts here if no prefill server can.
    """

    def __init__(
        self, client: SchedulerClient, model: ServedModel, prefills: PrefillPool | None = None, *, local: bool = False
    ) -> None:
        self._client = client
        self._model = model
        self._prefills = prefills
        self._local = local

    async def complete(self, request: GenerationRequest, emit: Emit) -> GenerationResult:
        """Continue the prompt to its end on this server. Raises HeadraceError; cancelling it cancels the request."""
        pool, source = self._prefills, request.kv_source
        if pool is None or (source is not None and source.address is None):
            return await self._compute_here(request, emit)
        begun = False

        async def watch(event: Progress | GenerationDelta) -> None:
            nonlocal begun
            begun = begun or isinstance(event, GenerationDelta)
            await emit(event)

        try:
            if source is not None:
                return await self._fetch_posted(request, watch, pool, source)
            return await self._prefill_remotely(request, watch, pool)
        except FirstTokenForbidden:
            log.info("%s: the first token would end the text before min_tokens; sampling it again", request.rid)
        except HeadraceError as error:
            if begun or not self._local or not _is_retryable(error.info):
                raise
            log.warning("%s: computing the prompt here, since %s", request.rid, error.info.message)
        again = msgspec.structs.replace(request, rid=f"{request.rid}-local")
        return await self._compute_here(again, emit)

    async def prefill(self, request: GenerationRequest, emit: Emit) -> tuple[Tokens, GenerationResult]:
        """Compute the prompt and send its KV under the request's ticket, or drop it if there is no ticket.

        Returns the first token, and the result: finish_reason if the request ended with that token, lease_s if the KV
        is held for a peer. Raises HeadraceError; cancelling it cancels the request.
        """
        first: Tokens | None = None
        submit = await self._submit(request, _outgoing_route(request))
        async with self._client.open(submit) as call:
            while True:
                event = await call.next()
                if isinstance(event, Tokens) and first is None:
                    first = event
                elif isinstance(event, Progress):
                    await emit(event)
                elif isinstance(event, Held):
                    call.keep()
                    break
                elif isinstance(event, RequestFinished):
                    break
        if first is None or not first.tokens:
            message = f"request {request.rid} ended without a first token"
            raise HeadraceError(ErrorInfo(code="internal_error", message=message, status=500))
        if isinstance(event, Held):
            return first, _held(event)
        result = _result(event, _finish_reason(event.reason), event.usage.completion_tokens)
        return first, msgspec.structs.replace(result, lease_s=0.0 if request.hold else None)

    async def _prefill_remotely(self, request: GenerationRequest, emit: Emit, pool: PrefillPool) -> GenerationResult:
        """Reserve pages here, have a prefill server compute the prompt, and continue from its KV."""
        ticket = secrets.token_hex(16)
        masks = request.constraint is not None
        with pool.chosen(request.prompt, request.cache_salt, masks=masks) as choice:
            submit = await self._submit(request, FetchFrom(choice.server.url, ticket))
            async with (
                self._client.open(submit) as call,
                pool.prefill_call(choice, _prefill_body(request, ticket), request.context.headers()) as prefill,
            ):

                def on_progress(progress: PrefillProgress) -> None:
                    call.deliver(Progress(rid=call.rid, phase=progress.phase, done=progress.done, total=progress.total))

                result = await self._follow(call, request, emit, lambda: prefill.start(on_progress, call.abort))
                result = msgspec.structs.replace(result, peer=choice.server.url)
                return _with_prefill_response(result, await prefill.response())

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
            submit = await self._submit(request, FetchFrom(server.url, source.ticket, posting))
            try:
                async with self._client.open(submit) as call:
                    result = await self._follow(call, request, emit, lambda: None, forbidden)
                    return msgspec.structs.replace(result, peer=server.url)
            except HeadraceError as error:
                raise HeadraceError(client_error(error.info)) from error

    async def _compute_here(self, request: GenerationRequest, emit: Emit) -> GenerationResult:
        async with self._client.open(await self._submit(request, DecodeHere())) as call:
            return await self._follow(call, request, emit, lambda: None)

    async def _submit(self, request: GenerationRequest, route: AnyRoute) -> Submit:
        sampling, constraint = await self._merge_stops(request), request.constraint
        if constraint is not None:
            sampling = msgspec.structs.replace(sampling, grammar=constraint.key)
        return Submit(
            rid=request.rid,
            prompt=packed.pack(request.prompt),
            sampling=sampling,
            constraint=constraint,
            route=route,
            priority=request.priority,
            replica=request.replica,
            tenant=request.tenant,
            slo_ttft_s=request.slo_ttft_s,
            deadline_s=request.deadline_s,
            cache_salt=request.cache_salt,
            progress=request.progress,
        )

    async def _merge_stops(self, request: GenerationRequest) -> SamplingParams:
        """Adds every token id that ends the text by itself to stop_token_ids: EOS, and tokens that contain a stop
        string, so that a prompt whose first token ends it is not sent to a peer. With min_tokens set the latter are
        left to the text, since the engine would never sample such a token before min_tokens."""
        ids = dict.fromkeys((*request.sampling.stop_token_ids, *self._eos(request)))
        if request.stop and request.sampling.min_tokens == 0:
            ids |= dict.fromkeys(await self._model.tokens.stop_ids(request.stop))
        return msgspec.structs.replace(request.sampling, stop_token_ids=tuple(ids))

    async def _check_first(self, request: GenerationRequest, tokens: tuple[int, ...]) -> None:
        """Raises HeadraceError (502) for a first token of a prefill server that has not masked it."""
        if request.constraint is None or not tokens:
            return
        if problem := await self._model.grammars.problem(request.constraint, tokens[0]):
            message = f"the prefill server has not kept to the constraint of this request: {problem}"
            raise HeadraceError(ErrorInfo(code=GRAMMAR_REJECTED, message=message, status=502))

    def _eos(self, request: GenerationRequest) -> tuple[int, ...]:
        return () if request.ignore_eos else self._model.tokenizer.eos_ids

    async def _follow(
        self,
        call: Call,
        request: GenerationRequest,
        emit: Emit,
        on_reserved: Callable[[], None],
        forbidden: frozenset[int] = frozenset(),
    ) -> GenerationResult:
        """Emit a call's events until it ends. on_reserved: called when pages are reserved here. forbidden: token ids
        that the first token must not be."""
        ends = frozenset((*request.sampling.stop_token_ids, *self._eos(request)))
        text = TextStream(self._model.tokenizer, request.prompt, request.stop, ends, request.sampling.min_tokens)
        stopped, seen = False, 0
        while True:
            event = await call.next()
            match event:
                case Reserved():
                    on_reserved()
                case Progress():
                    await emit(event)
                case Tokens() if not seen and not forbidden.isdisjoint(event.tokens[:1]):
                    raise FirstTokenForbidden
                case Tokens() if not stopped:
                    if not seen and call.fetches:
                        await self._check_first(request, event.tokens)
                    delta = _delta(text, ends, event)
                    await emit(delta)
                    stopped = text.stopped
                    if stopped and not call.ends_with(event.tokens[: text.tokens - seen]):
                        call.finish()
                    seen = text.tokens
                case RequestFinished():
                    if not stopped and (rest := text.flush()):
                        await emit(GenerationDelta(rest))
                    return _result(event, "stop" if stopped else _finish_reason(event.reason) or "stop", text.tokens)


def _is_retryable(error: ErrorInfo) -> bool:
    """Whether the prompt may be computed here after this error of the prefill server."""
    return error.status in RETRYABLE or error.code == NONFINITE


def _outgoing_route(request: GenerationRequest) -> AnyRoute:
    """Where the KV of a prompt that is only computed here goes."""
    return SendTo(request.ticket, request.hold) if request.ticket else Discard()


def _delta(text: TextStream, ends: frozenset[int], event: Tokens) -> GenerationDelta:
    """The text of new tokens, up to the one that ends it."""
    pieces: list[str] = []
    shown = 0
    for token in event.tokens:
        pieces.append(text.push(token))
        shown += not (text.stopped and token in ends)
        if text.stopped:
            break
    return GenerationDelta("".join(pieces), event.tokens[:shown], event.logprobs[:shown])


def _finish_reason(reason: str) -> FinishReason | None:
    return "stop" if reason == "stop" else "length" if reason == "length" else None


def _result(event: RequestFinished, reason: FinishReason | None, completion_tokens: int) -> GenerationResult:
    return GenerationResult(
        finish_reason=reason,
        usage=msgspec.structs.replace(event.usage, completion_tokens=completion_tokens),
        timing=event.timing,
        handoff=event.handoff,
        peer=event.peer,
        prompt_logprobs=event.prompt_logprobs,
    )


def _held(event: Held) -> GenerationResult:
    return GenerationResult(
        finish_reason=None,
        usage=event.usage,
        timing=event.timing,
        prompt_logprobs=event.prompt_logprobs,
        lease_s=event.lease_s,
    )


def _prefill_body(request: GenerationRequest, ticket: str) -> dict[str, Any]:
    """Body of POST /v1/prefill. The prefill server has the same tokenizer, so it merges stop strings as we do."""
    sampling = {key: value for key, value in msgspec.to_builtins(request.sampling).items() if value is not None}
    body = {
        **sampling,
        "rid": request.rid,
        "ticket": ticket,
        "prompt_token_ids": request.prompt,
        "stop": request.stop,
        "ignore_eos": request.ignore_eos,
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "stream": request.progress,
        **_constraint_fields(request.constraint),
    }
    limits = {
        "deadline_s": request.deadline_s,
        "slo_ttft_ms": None if request.slo_ttft_s is None else request.slo_ttft_s * 1000,
    }
    return body | {name: limit for name, limit in limits.items() if limit is not None}


def _constraint_fields(constraint: Constraint | None) -> dict[str, Any]:
    """The field of POST /v1/prefill that has the constraint."""
    if constraint is None:
        return {}
    text = json.loads(constraint.text) if constraint.kind == "choice" else constraint.text
    return {"structured_outputs": {constraint.kind: text}}


def _with_prefill_response(result: GenerationResult, response: PrefillResponse | None) -> GenerationResult:
    """Adds the prefill server's times and prompt logprobs to the result."""
    if response is None:
        return result
    seconds = {name: value / 1000 for name, value in response.timing_ms.items()}
    timing = Timing(
        bootstrap_s=seconds.get("bootstrap", 0.0),
        queue_s=seconds.get("queue", 0.0),
        forward_s=seconds.get("forward", 0.0),
        transfer_s=seconds.get("transfer", 0.0),
        decode_s=result.timing.decode_s,
    )
    entries = response.prompt_logprobs or ()
    logprobs = tuple(None if entry is None else entry.plain() for entry in entries)
    return msgspec.structs.replace(result, timing=timing, prompt_logprobs=logprobs)
