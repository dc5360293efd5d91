"""Responses of POST /inference/v1/generate: token ids, and texts where output_mode asks for them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from headrace.core.messages.replies import Progress
from headrace.core.runtime.clock import wall_time
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.kv_hints import HintAnswer
from headrace.core.types.requests.request import FinishReason, TokenLogprob
from headrace.server.api.request.completion_request import CompletionRequest
from headrace.server.api.request.schema import TokensBody
from headrace.server.api.response.choices import Choice, Output, positions
from headrace.server.api.response.usage import MORE, UsageReply, usage_report
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.server.frontend.served_model import ServedModel
from headrace.server.http.error_response import write_error_event
from headrace.server.http.streaming import EventWriter, made_aside
from headrace.text.logprobs import ChatLogprobs, chat_logprobs, top_logprobs
from headrace.text.tokenizer import Tokenizer


class RankedToken(msgspec.Struct):
    """A token, its logprob, and its place among the most likely ones, from 1."""

    token_id: int
    logprob: float
    rank: int | None


class GeneratedToken(RankedToken):
    """A token that was generated. The alternatives begin with it."""

    top_logprobs: list[RankedToken]


class TokenLogprobs(msgspec.Struct):
    """Of the tokens of a choice."""

    content: list[GeneratedToken]


class PromptLogprob(msgspec.Struct):
    """A token of the prompt, or one that was as likely."""

    logprob: float
    rank: int | None
    decoded_token: str


class TokensChoice(msgspec.Struct, kw_only=True):
    """One continuation; in a stream, what is new of it."""

    index: int
    token_ids: list[int]
    """The token that ended the text included."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token or stop string that ended the text; null for EOS and other ends."""
    logprobs: Any = None
    """content: a list of GeneratedToken; with output_mode "text" as of POST /v1/chat/completions."""
    text: str = MORE
    """With output_mode "text"."""


class TokensChunk(msgspec.Struct, kw_only=True):
    """An event of a stream of POST /inference/v1/generate; usage comes last and if asked for."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    choices: list[TokensChoice]
    usage: UsageReply = MORE
    prompt_token_ids: Sequence[int] = MORE
    """With return_token_ids, in the first chunk."""
    kv_hints: tuple[HintAnswer, ...] = MORE
    """What was granted of the request's KV hints, where it had any; in the chunk with the finish reason."""


class TokensReply(TokensChunk, kw_only=True):
    """Of POST /inference/v1/generate."""

    created: int
    model: str
    usage: UsageReply
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    """Of each token of the prompt, by token id."""
    kv_transfer_params: dict[str, Any] | None = None
    """From a prefill server that holds the KV: what the decode server needs to fetch it."""


class TokensFormat:
    """The AnswerFormat of token ids. index: position of a choice in the response."""

    def __init__(self, body: TokensBody, completion: CompletionRequest, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._model_name = model.called(completion.base.model)
        self._choices = completion.choices
        self._alternatives = completion.base.sampling.logprobs
        self._with_text = body.output_mode == "text"
        self._include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        self._head: dict[str, Any] = {"request_id": completion.base.rid, "output_mode": body.output_mode or "tokens"}
        self._prompt = completion.prompts[0] if body.return_token_ids else MORE

    async def body(self, outputs: Sequence[Output]) -> TokensReply:
        """All choices, with usage."""
        choices = [
            await made_aside(partial(self._whole, index, *output), positions(*output))
            for index, output in enumerate(outputs)
        ]
        first = outputs[0][1]
        prompt = partial(_prompt_logprobs, self._tokenizer, first.prompt_logprobs)
        return TokensReply(
            **self._head,
            created=int(wall_time()),
            model=self._model_name,
            choices=choices,
            usage=self._usage([result for _, result in outputs]),
            prompt_token_ids=self._prompt,
            prompt_logprobs=await made_aside(prompt, len(first.prompt_logprobs)),
            kv_hints=first.hints or MORE,
        )

    async def write_progress(self, events: EventWriter, index: int, progress: Progress) -> None:
        """This API has no such event."""

    async def write_delta(self, events: EventWriter, index: int, choice: Choice, delta: GenerationDelta) -> None:
        """A chunk of one choice."""
        ids = [*delta.tokens, *delta.end_tokens]
        if ids or (self._with_text and delta.text):
            logprobs = self._logprobs((*delta.logprobs, *delta.end_logprobs))
            new = TokensChoice(index=index, token_ids=ids, logprobs=logprobs, text=self._text(delta.text))
            await self._write(events, [new])

    async def write_finished(self, events: EventWriter, index: int, choice: Choice, result: GenerationResult) -> None:
        """A chunk with the finish reason."""
        ended = TokensChoice(
            index=index,
            token_ids=[],
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            text=self._text(""),
        )
        await self._write(events, [ended], kv_hints=result.hints or MORE)

    async def write_end(self, events: EventWriter, results: Sequence[GenerationResult]) -> None:
        """A chunk of usage if requested, and [DONE]."""
        if self._include_usage:
            await self._write(events, [], usage=self._usage(results))
        await events.done()

    async def write_error(self, events: EventWriter, info: ErrorInfo) -> None:
        """The error, and [DONE]."""
        await write_error_event(events, info)

    async def _write(self, events: EventWriter, choices: list[TokensChoice], **more: Any) -> None:
        chunk = TokensChunk(**self._head, choices=choices, prompt_token_ids=self._prompt, **more)
        self._prompt = MORE  # the first chunk alone has it
        await events.data(chunk)

    def _whole(self, index: int, choice: Choice, result: GenerationResult) -> TokensChoice:
        return TokensChoice(
            index=index,
            token_ids=choice.sampled,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            logprobs=self._logprobs((*choice.logprobs, *choice.end_logprobs)),
            text=self._text(choice.text),
        )

    def _text(self, text: str) -> Any:
        return text if self._with_text else MORE

    def _logprobs(self, values: Sequence[TokenLogprob]) -> TokenLogprobs | ChatLogprobs | None:
        """Of generated tokens, with the texts of tokens where the response has text."""
        if self._alternatives is None:
            return None
        if self._with_text:
            return chat_logprobs(self._tokenizer, values)
        return TokenLogprobs([_sampled(value, max(1, self._alternatives)) for value in values])

    def _usage(self, results: Sequence[GenerationResult]) -> UsageReply:
        generated = sum(result.usage.completion_tokens for result in results)
        return usage_report([result.usage for result in results[:: self._choices]], generated)


def _sampled(value: TokenLogprob, alternatives: int) -> GeneratedToken:
    """vLLM's list of alternatives: the token itself, then the most likely others, so many in all."""
    ranked = _ranked(value)
    own = next((each for each in ranked if each.token_id == value.token), None)
    rank = None if own is None else own.rank
    others = [each for each in ranked if each.token_id != value.token]
    tops = [RankedToken(value.token, value.logprob, rank), *others][:alternatives]
    return GeneratedToken(value.token, value.logprob, rank, tops)


def _ranked(value: TokenLogprob) -> list[RankedToken]:
    return [RankedToken(token, logprob, place) for place, (token, logprob) in enumerate(top_logprobs(value), 1)]


def _prompt_logprobs(
    tokenizer: Tokenizer, values: Sequence[TokenLogprob | None]
) -> list[dict[str, PromptLogprob] | None] | None:
    """None unless they were asked for. The first token has none."""

    def entry(value: TokenLogprob) -> dict[str, PromptLogprob]:
        found = {
            str(each.token_id): PromptLogprob(each.logprob, each.rank, tokenizer.piece(each.token_id))
            for each in _ranked(value)
        }
        own = PromptLogprob(value.logprob, None, tokenizer.piece(value.token))
        return {str(value.token): found.pop(str(value.token), own), **found}

    return [None if value is None else entry(value) for value in values] or None
