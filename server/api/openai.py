"""POST /v1/completions, POST /v1/chat/completions, GET /v1/models."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from core.config import ServerConfig
from core.errors import ErrorInfo, HeadraceError
from core.intake import Progress
from server.api.answers import Answer, EventStream, EventWriter, json_response
from server.api.bodies import parse_body, read_body
from server.api.choices import Choice, collect, run_choices
from server.api.errors import error_body
from server.api.forms import ChatForm, CompletionForm, Form
from server.api.prompts import check_model, completion_prompts, encode, encode_chat
from server.api.reports import headrace_report, usage_report
from server.api.sampling import (
    chat_logprobs_wanted,
    choices,
    refuse_unsupported,
    request_fields,
    sampling_params,
    seeded,
)
from server.api.schema import ChatBody, CompletionBody, OpenAIBody, StreamOptions
from server.generation import Delta, Job, Result
from server.service import Service

COMPLETION_TOKENS = 16  # OpenAI's default for max_tokens; chat takes what the model's length leaves


def openai_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Routes of OpenAI's API."""
    router = APIRouter()
    started = int(time.time())

    @router.get("/v1/models")
    async def models() -> Response:
        model = {
            "id": service.model_name,
            "object": "model",
            "created": started,
            "owned_by": "headrace",
            "max_model_len": service.max_model_len,
        }
        return json_response({"object": "list", "data": [model]})

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _check_role(config)
        body = parse_body(await read_body(request, config.max_body_bytes), CompletionBody)
        _check(service, body)
        prompts = completion_prompts(body.prompt)
        sampling = sampling_params(
            body, logprobs=body.logprobs, max_tokens=COMPLETION_TOKENS, vocab_size=service.vocab_size
        )
        base = _base_job("cmpl", body, sampling)
        tokens = [
            await encode(service, prompt, "prompt" if len(prompts) == 1 else f"prompt[{index}]")
            for index, prompt in enumerate(prompts)
        ]
        form = CompletionForm(service.tokens.tokenizer, logprobs=sampling.logprobs is not None)
        return OpenAIAnswer(service, form, base, tokens, choices(body)).respond(body)

    @router.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        _check_role(config)
        body = parse_body(await read_body(request, config.max_body_bytes), ChatBody)
        _check(service, body)
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        sampling = sampling_params(
            body,
            logprobs=chat_logprobs_wanted(body),
            max_tokens=service.max_model_len or COMPLETION_TOKENS,
            vocab_size=service.vocab_size,
        )
        base = _base_job("chatcmpl", body, sampling)
        tokens = [await encode_chat(service, body.messages)]
        form = ChatForm(service.tokens.tokenizer, logprobs=sampling.logprobs is not None)
        return OpenAIAnswer(service, form, base, tokens, choices(body)).respond(body)

    return router


def _check_role(config: ServerConfig) -> None:
    if config.role == "prefill":
        message = "a prefill server does not decode: use POST /v1/prefill here, or ask a decode server for completions"
        raise HeadraceError(ErrorInfo(code="wrong_role", message=message, status=404))


def _check(service: Service, body: OpenAIBody) -> None:
    check_model(service, body.model)
    refuse_unsupported(body)


def _base_job(prefix: str, body: OpenAIBody, sampling: Any) -> Job:
    """What all choices of one request share."""
    options = body.stream_options or StreamOptions()
    return Job(
        rid=f"{prefix}-{secrets.token_hex(16)}",
        prompt=(),
        sampling=sampling,
        progress=bool(body.stream and options.include_progress),
        **request_fields(body),
    )


class OpenAIAnswer:
    """One request's answer, whole or streamed: n choices for each prompt, numbered prompt by prompt."""

    def __init__(self, service: Service, form: Form, base: Job, prompts: Sequence[tuple[int, ...]], n: int) -> None:
        self._service = service
        self._form = form
        self._n = n
        self._head = {"id": base.rid, "created": int(time.time()), "model": service.model_name}
        self._jobs = [self._job(base, prompt, choice) for prompt in prompts for choice in range(n)]
        if len(self._jobs) > 1:
            self._jobs = [
                msgspec.structs.replace(job, rid=f"{base.rid}-{index}") for index, job in enumerate(self._jobs)
            ]

    def respond(self, body: OpenAIBody) -> Response:
        if not body.stream:
            return Answer(self._whole)
        options = body.stream_options or StreamOptions()
        return EventStream(lambda events: self._stream(events, usage=bool(options.include_usage)), _tell)

    def _job(self, base: Job, prompt: tuple[int, ...], choice: int) -> Job:
        """max_tokens is cut to the room that the prompt leaves."""
        room = self._service.max_model_len - len(prompt) if self._service.max_model_len else base.sampling.max_tokens
        tokens = min(base.sampling.max_tokens, room)
        sampling = msgspec.structs.replace(
            seeded(base.sampling, choice), max_tokens=tokens, min_tokens=min(base.sampling.min_tokens, tokens)
        )
        return msgspec.structs.replace(base, prompt=prompt, sampling=sampling)

    async def _whole(self) -> dict[str, Any]:
        found = await collect(self._service, self._jobs)
        return {
            **self._head,
            "object": self._form.name,
            "choices": [self._form.whole(index, choice, result) for index, (choice, result) in enumerate(found)],
            **self._totals([result for _, result in found]),
        }

    async def _stream(self, events: EventWriter, *, usage: bool) -> None:
        head = {**self._head, "object": self._form.chunk_name}
        so_far: dict[int, Choice] = {}

        async def open_choice(index: int) -> Choice:
            if index not in so_far:
                so_far[index] = Choice()
                if (opening := self._form.opening(index)) is not None:
                    await events.data({**head, "choices": [opening]})
            return so_far[index]

        async def emit(index: int, event: Progress | Delta) -> None:
            if isinstance(event, Progress):
                progress = {"choice": index, "phase": event.phase, "done": event.done, "total": event.total}
                await events.data({**head, "choices": [], "headrace": progress})
                return
            choice = await open_choice(index)
            if event.text or event.logprobs:
                await events.data({**head, "choices": [self._form.delta(index, event, choice)]})
            choice.take(event)

        async def ended(index: int, result: Result) -> None:
            await open_choice(index)
            await events.data({**head, "choices": [self._form.last(index, result.finish_reason)]})

        results = await run_choices(self._service, self._jobs, emit, ended)
        if usage:
            await events.data({**head, "choices": [], **self._totals(results)})
        await events.done()

    def _totals(self, results: Sequence[Result]) -> dict[str, Any]:
        """Usage over all choices; times and handoff of the first."""
        generated = sum(result.usage.completion_tokens for result in results)
        return {
            "usage": usage_report([result.usage for result in results[:: self._n]], generated),
            "headrace": headrace_report(results[0]),
        }


async def _tell(events: EventWriter, info: ErrorInfo) -> None:
    await events.data(error_body(info))
    await events.done()
