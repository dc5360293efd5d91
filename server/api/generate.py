"""POST /generate: SGLang's own form of completions."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from core.config import ServerConfig
from core.errors import HeadraceError, invalid
from core.intake import Progress
from core.request import TokenLogprob
from server.api.answers import Answer, EventStream, EventWriter
from server.api.asked import Asked, jobs_to_decode, jobs_to_hand_over, telling_the_other_side
from server.api.bodies import parse_body, read_body
from server.api.choices import Choice, collect, run_choices
from server.api.handover import hand_over, held_params, lift_limits
from server.api.openai_answer import tell_error
from server.api.prompts import MAX_PROMPTS, Prompt, check_model, encode
from server.api.sampling import choices, prefix_salt, request_fields, sampling_params
from server.api.schema import GenerateBody, GenerateSampling, OpenAIBody
from server.generation import Delta, Job, Result
from server.naming import Names, prompt_ids
from server.service import Service

MAX_NEW_TOKENS = 128  # SGLang's default
_THEIR_NAMES = {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    **{
        name: f"sampling_params.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "stop", "stop_token_ids", "ignore_eos", "n")
    },
}


def generate_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Routes of SGLang's API."""
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        raw = await read_body(request, config.max_body_bytes)
        with telling_the_other_side(service, config, raw):
            names = parse_body(raw, Names)
            body = parse_body(raw, GenerateBody)
            with _their_names():
                asked, several = await _asked(service, body, names)
            if config.role == "prefill":
                jobs = _tellable(jobs_to_hand_over(service, asked, names), names, several)
                return GenerateAnswer(service, asked, jobs, several).hand_over(request.url.hostname or "")
            jobs = jobs_to_decode(service, asked, names, config)
            return GenerateAnswer(service, asked, jobs, several).respond(body)

    return router


def _tellable(jobs: list[Job], names: Names, several: bool) -> list[Job]:
    """An answer that is a list has no place for kv_transfer_params, so nobody could fetch what it holds, unless the
    router has named it."""
    params = names.kv_transfer_params
    if several and jobs[0].hold and params is not None and params.transfer_id is None:
        return [msgspec.structs.replace(job, ticket=None, hold=False) for job in jobs]
    return jobs


@contextmanager
def _their_names() -> Iterator[None]:
    """Complaints about sampling name the fields of this API."""
    try:
        yield
    except HeadraceError as error:
        ours = error.info.field or ""
        theirs = _THEIR_NAMES.get(ours)
        if theirs is None:
            raise
        message = error.info.message.replace(ours, theirs, 1)
        raise HeadraceError(msgspec.structs.replace(error.info, field=theirs, message=message)) from error


async def _asked(service: Service, body: GenerateBody, names: Names) -> tuple[Asked, bool]:
    """What is asked for, and whether the answer is a list. Raises HeadraceError (400, 404)."""
    check_model(service, body.model)
    ours = _plain(body)
    _refuse_unsupported(body.sampling_params or GenerateSampling())
    lift_limits(ours, names)
    prompts, batch = _prompts(body)
    given = prompt_ids(names, len(prompts)) or prompts
    sampling = sampling_params(
        ours,
        logprobs=(body.top_logprobs_num or 0) if body.return_logprob else None,
        max_tokens=MAX_NEW_TOKENS,
        vocab_size=service.vocab_size,
    )
    field = "text" if body.text is not None else "input_ids"
    tokens = [
        await encode(service, prompt, f"{field}[{index}]" if batch else field) for index, prompt in enumerate(given)
    ]
    rid = body.rid if isinstance(body.rid, str) else f"gen-{secrets.token_hex(16)}"
    base = Job(rid=f"{rid}-{secrets.token_hex(4)}", prompt=(), sampling=sampling, **request_fields(ours))
    count = choices(ours)
    return Asked(base, tokens, count, _salts(body, len(prompts))), batch or count > 1


def _salts(body: GenerateBody, prompts: int) -> list[str]:
    """The salt of the prefix cache for each prompt. Raises HeadraceError (400)."""
    salts = _for_each("cache_salt", body.cache_salt, prompts)
    keys = _for_each("extra_key", body.extra_key, prompts)
    return [prefix_salt(salt, key) for salt, key in zip(salts, keys, strict=True)]


def _for_each(field: str, value: str | list[str] | None, prompts: int) -> Sequence[str | None]:
    """A field's value for each prompt. Raises HeadraceError (400) for a list of another length."""
    if not isinstance(value, list):
        return [value] * prompts
    if len(value) != prompts:
        message = f"{field} has {len(value)} entries and the request has {prompts} prompts; send {prompts} or a string"
        raise invalid(field, message)
    return value


def _refuse_unsupported(given: GenerateSampling) -> None:
    """Raises HeadraceError (400) for what would change the answer and cannot be served; harmless values pass."""
    asked = {
        "frequency_penalty": bool(given.frequency_penalty),
        "presence_penalty": bool(given.presence_penalty),
        "repetition_penalty": given.repetition_penalty not in (None, 1.0),
        "json_schema": given.json_schema is not None,
        "regex": given.regex is not None,
        "ebnf": given.ebnf is not None,
    }
    for name, there in asked.items():
        if there:
            field = f"sampling_params.{name}"
            raise invalid(field, f"{field} is not supported; leave it out", code="unsupported")


def _plain(body: GenerateBody) -> OpenAIBody:
    """The sampling fields under the names of the other routes."""
    given = body.sampling_params or GenerateSampling()
    wants_prompt = bool(body.return_logprob) and body.logprob_start_len is not None and body.logprob_start_len >= 0
    return OpenAIBody(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        min_p=given.min_p,
        seed=given.sampling_seed,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_new_tokens,
        stop=given.stop,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        n=given.n,
        prompt_logprobs=(body.top_logprobs_num or 0) if wants_prompt else None,
        priority=body.priority,
    )


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid("text", "send exactly one of text and input_ids")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        prompts: list[Prompt] = list(body.text)
    else:
        ids = body.input_ids or []
        lists = [item for item in ids if isinstance(item, list)]
        if not lists:
            return [[item for item in ids if isinstance(item, int)]], False
        if len(lists) != len(ids):
            raise invalid("input_ids", "input_ids mixes token ids and lists; send one kind", code="invalid_type")
        prompts = list(lists)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        field = "input_ids" if body.text is None else "text"
        raise invalid(field, f"{field} has {len(prompts)} prompts; 1 to {MAX_PROMPTS} fit in one request")
    return prompts, True


class GenerateAnswer:
    """One request's answer, whole or streamed: one object, or a list of them."""

    def __init__(self, service: Service, asked: Asked, jobs: Sequence[Job], several: bool) -> None:
        self._service = service
        self._asked = asked
        self._jobs = jobs
        self._several = several
        self._started = time.monotonic()

    def respond(self, body: GenerateBody) -> Response:
        if not body.stream:
            return Answer(self._whole)
        return EventStream(self._stream, tell_error)

    def hand_over(self, host: str) -> Response:
        """The answer of a prefill server, never a stream. host: under which the client has reached this server."""
        return Answer(lambda: self._handed_over(host))

    async def _whole(self) -> object:
        return self._shown(await collect(self._service, self._jobs))

    async def _handed_over(self, host: str) -> object:
        found = await hand_over(self._service, self._jobs)
        shown = self._shown(found)
        if not isinstance(shown, dict):
            return shown
        return shown | held_params(self._service, host, self._asked.prompts, self._jobs, found)

    def _shown(self, found: Sequence[tuple[Choice, Result]]) -> list[dict[str, Any]] | dict[str, Any]:
        shown = [self._object(job, choice, result) for job, (choice, result) in zip(self._jobs, found, strict=True)]
        return shown if self._several else shown[0]

    async def _stream(self, events: EventWriter) -> None:
        """Every event has all of the text so far, as SGLang's have."""
        so_far = [Choice() for _ in self._jobs]

        async def emit(index: int, event: Progress | Delta) -> None:
            if isinstance(event, Delta):
                so_far[index].take(event)
                if event.text:
                    await events.data(self._event(index, so_far[index], None))

        async def ended(index: int, result: Result) -> None:
            await events.data(self._event(index, so_far[index], result))

        await run_choices(self._service, self._jobs, emit, ended)
        await events.done()

    def _event(self, index: int, choice: Choice, result: Result | None) -> dict[str, Any]:
        shown = self._object(self._jobs[index], choice, result)
        return {**shown, "index": index} if self._several else shown

    def _object(self, job: Job, choice: Choice, result: Result | None) -> dict[str, Any]:
        """result None: it goes on."""
        completion = len(choice.tokens) if result is None else result.usage.completion_tokens
        about: dict[str, Any] = {
            "id": job.rid,
            "finish_reason": None if result is None else _finish_reason(result, completion),
            "prompt_tokens": len(job.prompt),
            "completion_tokens": completion,
            "cached_tokens": 0 if result is None else result.usage.cached_tokens,
        }
        if job.sampling.logprobs is not None:
            prompt = result.prompt_logprobs if result is not None else ()
            about |= {
                "input_token_logprobs": [_pair(value) for value in prompt],
                "output_token_logprobs": [_pair(value) for value in choice.logprobs],
            }
            if job.sampling.logprobs:
                about |= {
                    "input_top_logprobs": [_tops(value) for value in prompt],
                    "output_top_logprobs": [_tops(value) for value in choice.logprobs],
                }
        if result is not None:
            about["e2e_latency"] = round(time.monotonic() - self._started, 6)
        return {"text": choice.text, "output_ids": choice.tokens, "meta_info": about}


def _finish_reason(result: Result, completion: int) -> dict[str, Any]:
    if result.finish_reason == "stop":
        return {"type": "stop", "matched": None}
    return {"type": "length", "length": completion}


def _pair(value: TokenLogprob | None) -> list[Any]:
    """[logprob, token id, text]; texts are left out, as they are by default in SGLang."""
    return [None, 0, None] if value is None else [value.logprob, value.token, None]


def _tops(value: TokenLogprob | None) -> list[list[Any]] | None:
    if value is None:
        return None
    return [[logprob, token, None] for token, logprob in zip(value.top_ids, value.top_logprobs, strict=True)]
