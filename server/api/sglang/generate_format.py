"""Responses of SGLang's POST /generate."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.kv_hints import HintAnswer
from headrace.core.types.requests.request import TokenLogprob
from headrace.server.api.response.choices import Choice, Output, positions
from headrace.server.api.response.hidden_format import nested_lists
from headrace.server.api.response.usage import MORE, CachedByTier, Count, cached_by_tier
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationRequest, GenerationResult
from headrace.server.http.error_response import write_error_event
from headrace.server.http.streaming import EventWriter, made_aside
from headrace.text.logprobs import top_logprobs


class GenerateMeta(msgspec.Struct):
    """meta_info, as in SGLang."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    cached_tokens_details: CachedByTier = MORE
    """Where some were loaded from a tier."""
    input_token_logprobs: list[list[Any]] = MORE
    output_token_logprobs: list[list[Any]] = MORE
    input_top_logprobs: list[Any] = MORE
    output_top_logprobs: list[Any] = MORE
    e2e_latency: float = MORE
    kv_hints: tuple[HintAnswer, ...] = MORE
    """What was granted of the request's KV hints, where it had any."""
    hidden_states: Any = MORE
    """Of the prompt, followed by that of each generated token whose state was computed."""


class GenerateReply(msgspec.Struct):
    """One text of POST /generate. In a stream each event has all of the text so far, or what is new."""

    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int = MORE
    """Position of the text where a stream has several."""
    kv_transfer_params: dict[str, Any] = MORE
    """From a prefill server that holds the KV: what the decode server needs to fetch it."""


class GenerateFormat:
    """The AnswerFormat of one object, or of a list of them. incremental: every event of a stream has the tokens that
    are new, as soon as they are known; else all of the text so far."""

    def __init__(self, requests: Sequence[GenerationRequest], *, as_list: bool, incremental: bool = False) -> None:
        self._requests = requests
        self._as_list = as_list
        self._incremental = incremental
        self._started = time.monotonic()

    async def body(self, outputs: Sequence[Output]) -> GenerateReply | list[GenerateReply]:
        """One object, or a list of them."""
        objects = [await self._ended(each, *output) for each, output in zip(self._requests, outputs, strict=True)]
        return objects if self._as_list else objects[0]

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """This API has no such event."""

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """An object with the text so far, or with what is new."""
        if self._incremental and (delta.text or delta.tokens):
            new = self._object(self._requests[index], _only(delta), None)
            new.meta_info.completion_tokens = len(choice.tokens)
            await self._write(events, index, new)
        elif delta.text and not self._incremental:
            make = partial(self._object, self._requests[index], choice, None)
            await self._write(events, index, await made_aside(make, len(choice.logprobs)))

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """An object with the finish reason, and the whole text, or nothing new."""
        told = Choice() if self._incremental else choice
        await self._write(events, index, await self._ended(self._requests[index], told, result))

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """[DONE]."""
        await events.done()

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """The error, and [DONE]."""
        await write_error_event(events, info)

    async def _write(self, events: EventWriter, index: int, event: GenerateReply) -> None:
        await events.data(msgspec.structs.replace(event, index=index) if self._as_list else event)

    async def _ended(self, request: GenerationRequest, choice: Choice, result: GenerationResult) -> GenerateReply:
        """JSON of one choice that has ended."""
        make = partial(self._object, request, choice, result)
        ended = await made_aside(make, positions(choice, result))
        if result.hidden is not None:
            ended.meta_info.hidden_states = await nested_lists(result.hidden, len(request.prompt))
        return ended

    def _object(self, request: GenerationRequest, choice: Choice, result: GenerationResult | None) -> GenerateReply:
        """JSON of one choice. result: None while it is being generated."""
        completion = len(choice.tokens) if result is None else result.usage.completion_tokens
        meta = GenerateMeta(
            id=request.rid,
            finish_reason=None if result is None else _finish_reason(result, completion),
            prompt_tokens=len(request.prompt),
            completion_tokens=completion,
            cached_tokens=0 if result is None else result.usage.cached_tokens,
        )
        if request.sampling.logprobs is not None:
            prompt = _prompt_logprobs(request, result)
            meta.input_token_logprobs = [_pair(token, value) for token, value in prompt]
            meta.output_token_logprobs = [_pair(value.token, value) for value in choice.logprobs]
            if request.sampling.logprobs:
                meta.input_top_logprobs = [_tops(value) for _, value in prompt]
                meta.output_top_logprobs = [_tops(value) for value in choice.logprobs]
        if result is not None:
            meta.cached_tokens_details = cached_by_tier([result.usage])
            meta.kv_hints = result.hints or MORE
            meta.e2e_latency = round(time.monotonic() - self._started, 6)
        return GenerateReply(choice.text, choice.tokens, meta)


def _only(delta: GenerationDelta) -> Choice:
    """A choice that has nothing but the delta."""
    choice = Choice()
    choice.add(delta)
    return choice


def _finish_reason(result: GenerationResult, completion: int) -> dict[str, Any]:
    if result.finish_reason == "stop":
        return {"type": "stop", "matched": result.stop_reason}
    return {"type": "length", "length": completion}


def _prompt_logprobs(
    request: GenerationRequest, result: GenerationResult | None
) -> list[tuple[int, TokenLogprob | None]]:
    """The tokens of the prompt from logprob_start_len on, and their logprobs; the first one has none."""
    if result is None or request.sampling.prompt_logprobs is None:
        return []
    start = request.sampling.prompt_logprobs_start - 1
    known = result.prompt_logprobs or (None,) * len(request.prompt)  # the last token alone has none
    return list(zip(request.prompt, known, strict=True))[start:]


def _pair(token: int, value: TokenLogprob | None) -> list[Any]:
    """[logprob, token id, text]; the text is null, as by default in SGLang."""
    return [None if value is None else value.logprob, token, None]


def _tops(value: TokenLogprob | None) -> list[list[Any]] | None:
    """The most likely tokens of a position."""
    return None if value is None else [[logprob, token, None] for token, logprob in top_logprobs(value)]
