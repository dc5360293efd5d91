"""From a tokenized job to text: computed here, or fetched from a prefill server and decoded here.

computed:  Submit ─────────────────────────────────────────────► Tokens ... RequestFinished
fetched:   Submit(ticket) ─► Reserved ─► POST /v1/prefill there ─► Tokens ... RequestFinished
                                              └─ refused or failed: Abort with its error ─► Failed
collected: Submit(ticket), the prompt being posted by somebody else ─► Tokens ... RequestFinished
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from headrace.core.messages.frontend import Held, Progress, RequestFinished, Reserved, Submit, Tokens
from headrace.core.types import packed
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.request import (
    AnyRoute,
    DecodeHere,
    Discard,
    FetchFrom,
    FinishReason,
    HandoffStats,
    PromptPosting,
    SamplingParams,
    SendTo,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.server.frontend.scheduler_client import Call, SchedulerClient
from headrace.server.tokenizer.detokenizer import TextStream
from headrace.server.tokenizer.service import TokenService
from headrace.server.upstream.handoff_params import KvSource
from headrace.server.upstream.prefill_pool import PrefillPool
from headrace.server.upstream.prefill_request import FetchProgress, PrefillAnswer, passed_on

log = logging.getLogger(__name__)

RETRYABLE = (429, 502, 503, 504)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue, validated. sampling is as the client gave it: stops and EOS are not merged in. origin:
    where its KV comes from, if somebody else has it computed."""

    rid: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    progress: bool = False
    ticket: str | None = None
    hold: bool = False
    origin: KvSource | None = None


class Delta(msgspec.Struct, frozen=True):
    """More of the text. text may be empty while a character or a possible stop string is held back; tokens and
    logprobs (empty unless asked for) are what came since the last delta, without the token that ends the text."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


class GenerationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a job ended. finish_reason None: handed over after its first token, decoding goes on elsewhere.
    lease_s: how long its KV is held for a peer, 0 if it is not; None unless the job asked for that."""

    finish_reason: FinishReason | None
    usage: Usage
    timing: Timing
    handoff: HandoffStats = HandoffStats()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    lease_s: float | None = None


class FirstTokenUnfit(Exception):
    """The prefill server did not know that this token must not come first."""


Emit = Callable[[Progress | Delta], Awaitable[None]]


async def ignore(_event: Progress | Delta) -> None:
    """The Emit of a job that nobody watches."""


class Generation:
    """Runs jobs. pool is None unless this is a decode server; local lets it compute prompts itself when it must."""

    def __init__(
        self, client: SchedulerClient, tokens: TokenService, pool: PrefillPool | None = None, *, local: bool = False
    ) -> None:
        self._client = client
        self._tokens = tokens
        self._pool = pool
        self._local = local

    async def complete(self, job: Job, emit: Emit) -> GenerationResult:
        """Continue the prompt to its end here. Raises HeadraceError; cancelling it cancels the request."""
        if self._pool is None or (job.origin is not None and job.origin.address is None):
            return await self._run(job, emit)
        begun = False

        async def watch(event: Progress | Delta) -> None:
            nonlocal begun
            begun = begun or isinstance(event, Delta)
            await emit(event)

        try:
            if job.origin is not None:
                return await self._collect(job, watch, self._pool, job.origin)
            return await self._fetch(job, watch, self._pool)
        except FirstTokenUnfit:
            log.info("%s: the first token would end the text before min_tokens; sampling it again", job.rid)
        except HeadraceError as error:
            if begun or not self._local or error.info.status not in RETRYABLE:
                raise
            log.warning("%s: computing the prompt here, since %s", job.rid, error.info.message)
        again = msgspec.structs.replace(job, rid=f"{job.rid}-local")
        return await self._run(again, emit)

    async def prefill(self, job: Job, emit: Emit) -> tuple[Tokens, GenerationResult]:
        """Compute the prompt and hand it over under the job's ticket (no ticket: drop its KV). Returns the first
        token with how it ended, or that its KV is held for a peer."""
        first: Tokens | None = None
        async with self._client.open(await self._submit(job, _outgoing_route(job))) as call:
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
            message = f"request {job.rid} ended without a first token"
            raise HeadraceError(ErrorInfo(code="internal_error", message=message, status=500))
        if isinstance(event, Held):
            return first, _held(event)
        result = _result(event, _reason(event.reason), event.usage.completion_tokens)
        return first, msgspec.structs.replace(result, lease_s=0.0 if job.hold else None)

    async def _fetch(self, job: Job, emit: Emit, pool: PrefillPool) -> GenerationResult:
        server = pool.choose()
        ticket = secrets.token_hex(16)
        submit = await self._submit(job, FetchFrom(server.url, ticket))
        async with (
            self._client.open(submit) as call,
            pool.fetch(server, len(job.prompt), _prefill_body(job, ticket)) as fetch,
        ):

            def progress(news: FetchProgress) -> None:
                call.deliver(Progress(rid=call.rid, phase=news.phase, done=news.done, total=news.total))

            result = await self._follow(call, job, emit, lambda: fetch.start(progress, call.abort))
            return _with_answer(result, await fetch.answer())

    async def _collect(self, job: Job, emit: Emit, pool: PrefillPool, origin: KvSource) -> GenerationResult:
        """Take the KV of a prompt that somebody else has posted, and go on from there. Raises FirstTokenUnfit for a
        first token that min_tokens forbids; all but the last of the prompt's pages are in the prefix cache then."""
        assert origin.address is not None, "there is nothing to collect"
        forbidden: frozenset[int] = frozenset()
        if origin.held and job.sampling.min_tokens:
            forbidden = frozenset((await self._merge_stops(job)).stop_token_ids)
        async with pool.visit(origin.address) as server:
            posting: PromptPosting = "external" if origin.wait else "done"
            submit = await self._submit(job, FetchFrom(server.url, origin.ticket, posting))
            try:
                async with self._client.open(submit) as call:
                    return await self._follow(call, job, emit, lambda: None, forbidden)
            except HeadraceError as error:
                raise HeadraceError(passed_on(error.info)) from error

    async def _run(self, job: Job, emit: Emit) -> GenerationResult:
        async with self._client.open(await self._submit(job, DecodeHere())) as call:
            return await self._follow(call, job, emit, lambda: None)

    async def _submit(self, job: Job, route: AnyRoute) -> Submit:
        return Submit(
            rid=job.rid,
            prompt=packed.pack(job.prompt),
            sampling=await self._merge_stops(job),
            route=route,
            priority=job.priority,
            deadline_s=job.deadline_s,
            cache_salt=job.cache_salt,
            progress=job.progress,
        )

    async def _merge_stops(self, job: Job) -> SamplingParams:
        """Sampling with every token id that ends the text by itself: the client's, EOS, and the tokens that contain
        a stop string (so that a prompt whose first token ends it is never handed over). With min_tokens set, the
        last kind is left to the text, since the engine would keep such tokens from being sampled at all."""
        ids = dict.fromkeys((*job.sampling.stop_token_ids, *self._eos(job)))
        if job.stop and job.sampling.min_tokens == 0:
            ids |= dict.fromkeys(await self._tokens.stop_ids(job.stop))
        return msgspec.structs.replace(job.sampling, stop_token_ids=tuple(ids))

    def _eos(self, job: Job) -> tuple[int, ...]:
        return () if job.ignore_eos else self._tokens.tokenizer.eos_ids

    async def _follow(
        self,
        call: Call,
        job: Job,
        emit: Emit,
        on_reserved: Callable[[], None],
        forbidden: frozenset[int] = frozenset(),
    ) -> GenerationResult:
        """Take a call's events to its end. forbidden: what the first token must not be."""
        ends = frozenset((*job.sampling.stop_token_ids, *self._eos(job)))
        text = TextStream(self._tokens.tokenizer, job.prompt, job.stop, ends, job.sampling.min_tokens)
        stopped, seen = False, 0
        while True:
            event = await call.next()
            match event:
                case Reserved():
                    on_reserved()
                case Progress():
                    await emit(event)
                case Tokens() if not seen and not forbidden.isdisjoint(event.tokens[:1]):
                    raise FirstTokenUnfit
                case Tokens() if not stopped:
                    delta = _delta(text, ends, event)
                    await emit(delta)
                    stopped = text.stopped
                    if stopped and not call.ends_with(event.tokens[: text.tokens - seen]):
                        call.finish()
                    seen = text.tokens
                case RequestFinished():
                    if not stopped and (rest := text.flush()):
                        await emit(Delta(rest))
                    return _result(event, "stop" if stopped else _reason(event.reason) or "stop", text.tokens)


def _outgoing_route(job: Job) -> AnyRoute:
    """Where the KV of a prompt that is only computed here goes."""
    return SendTo(job.ticket, job.hold) if job.ticket else Discard()


def _delta(text: TextStream, ends: frozenset[int], event: Tokens) -> Delta:
    """Push tokens until one ends the text."""
    pieces: list[str] = []
    shown = 0
    for token in event.tokens:
        pieces.append(text.push(token))
        shown += not (text.stopped and token in ends)
        if text.stopped:
            break
    return Delta("".join(pieces), event.tokens[:shown], event.logprobs[:shown])


def _reason(reason: str) -> FinishReason | None:
    return "stop" if reason == "stop" else "length" if reason == "length" else None


def _result(event: RequestFinished, reason: FinishReason | None, completion_tokens: int) -> GenerationResult:
    return GenerationResult(
        finish_reason=reason,
        usage=msgspec.structs.replace(event.usage, completion_tokens=completion_tokens),
        timing=event.timing,
        handoff=event.handoff,
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


def _prefill_body(job: Job, ticket: str) -> dict[str, Any]:
    """The request to the prefill server, which merges stops as we do: it has the same tokenizer."""
    sampling = {key: value for key, value in msgspec.to_builtins(job.sampling).items() if value is not None}
    return {
        **sampling,
        "rid": job.rid,
        "ticket": ticket,
        "prompt_token_ids": job.prompt,
        "stop": job.stop,
        "ignore_eos": job.ignore_eos,
        "priority": job.priority,
        "cache_salt": job.cache_salt,
        "stream": job.progress,
    } | ({} if job.deadline_s is None else {"deadline_s": job.deadline_s})


def _with_answer(result: GenerationResult, answer: PrefillAnswer | None) -> GenerationResult:
    """Put the prefill server's times (and logprobs of the prompt) beside our own time of decoding."""
    if answer is None:
        return result
    seconds = {name: value / 1000 for name, value in answer.timing_ms.items()}
    timing = Timing(
        bootstrap_s=seconds.get("bootstrap", 0.0),
        queue_s=seconds.get("queue", 0.0),
        forward_s=seconds.get("forward", 0.0),
        transfer_s=seconds.get("transfer", 0.0),
        decode_s=result.timing.decode_s,
    )
    entries = answer.prompt_logprobs or ()
    logprobs = tuple(None if entry is None else entry.plain() for entry in entries)
    return msgspec.structs.replace(result, timing=timing, prompt_logprobs=logprobs)
