"""POST /v1/prefill, DELETE /v1/prefill/{rid}, GET /v1/handoff."""

import re
import secrets
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.config import ServerConfig
from headrace.core.messages.frontend import Progress, Tokens
from headrace.core.types.errors import UNKNOWN_RID, ErrorInfo, HeadraceError, invalid, unavailable
from headrace.server.api.request.body import parse_body, read_body
from headrace.server.api.request.completion import telling_the_other_side
from headrace.server.api.request.prompts import check_model, encode_any
from headrace.server.api.request.sampling import request_fields, sampling_params
from headrace.server.api.request.schema import PrefillBody
from headrace.server.api.response.answer import Answer, EventStream, EventWriter, json_response
from headrace.server.api.response.errors import error_body
from headrace.server.api.response.usage import handoff_report, timing_report
from headrace.server.frontend.generation import Delta, Emit, Job, ignore
from headrace.server.frontend.service import Service
from headrace.server.tokenizer.logprobs import native_entries, native_entry
from headrace.server.upstream.handoff_params import MAX_TICKET_CHARS

PROTOCOL_VERSIONS = (1,)
_RID = re.compile(r"[\x21-\x7e]{1,128}")


def native_routes(service: Service, config: ServerConfig) -> APIRouter:
    """Routes of Headrace's own API."""
    router = APIRouter()

    @router.post("/v1/prefill")
    async def prefill(request: Request) -> Response:
        raw = await read_body(request, config.max_body_bytes)
        with telling_the_other_side(service, config, raw):
            body = parse_body(raw, PrefillBody)
            check_model(service, body.model)
            job = await _job(service, config, body)
        if not body.stream:
            return Answer(lambda: _prefill(service, job, ignore))
        return EventStream(lambda events: _stream(service, job, events), _tell)

    @router.delete("/v1/prefill/{rid}")
    async def cancel(rid: str) -> Response:
        if not service.cancel(rid):
            raise invalid("rid", f"no request {rid!r} is open", code=UNKNOWN_RID, status=404)
        return json_response({"cancelled": True})

    return router


def handoff_routes(service: Service, config: ServerConfig) -> APIRouter:
    """GET /v1/handoff."""
    router = APIRouter()

    @router.get("/v1/handoff")
    async def handoff() -> Response:
        """Where decode servers find the control endpoint."""
        engine = service.engine
        if config.role != "prefill":
            message = f"this server has role {config.role}; decode servers fetch from a server with --role prefill"
            raise HeadraceError(ErrorInfo(code="wrong_role", message=message, status=404))
        if engine is None or not engine.control_port:
            raise unavailable("the server is loading", code="not_ready")
        return json_response(
            {
                "protocol": PROTOCOL_VERSIONS,
                "instance": engine.instance,
                "control_port": engine.control_port,
                "bootstrap_port": config.bootstrap_port,
                "model": service.model_name,
                "fingerprint": engine.fingerprint or None,
            }
        )

    return router


async def _job(service: Service, config: ServerConfig, body: PrefillBody) -> Job:
    """Raises HeadraceError (400) for a body that cannot be served in this role."""
    ticket = _ticket(config, body)
    if body.rid is not None and not _RID.fullmatch(body.rid):
        raise invalid("rid", "rid has to have 1 to 128 printable ASCII characters without spaces")
    fields = request_fields(body)
    sampling = sampling_params(body, logprobs=body.logprobs, max_tokens=16, vocab_size=service.vocab_size)
    return Job(
        rid=body.rid or f"pf-{secrets.token_hex(16)}",
        prompt=await encode_any(service, body),
        sampling=sampling,
        ticket=ticket,
        hold=body.handoff == "hold",
        progress=bool(body.stream),
        **fields,
    )


def _ticket(config: ServerConfig, body: PrefillBody) -> str | None:
    """The ticket under which the KV leaves, None when the client says that nobody wants it."""
    if body.handoff not in (None, "none", "hold"):
        raise invalid("handoff", f'handoff is {body.handoff!r}; it has to be "hold", "none" or left out')
    if body.handoff == "none":
        if body.ticket is not None:
            raise invalid("ticket", 'a ticket and handoff "none" contradict each other; send one of them')
        return None
    if config.role != "prefill":
        message = (
            f'this server has role {config.role} and hands nothing over; send handoff "none" or ask a prefill server'
        )
        raise invalid("ticket", message, code="wrong_role")
    if body.ticket is None:
        message = 'ticket is required: the name under which a decode peer fetches the KV (or handoff "none")'
        raise invalid("ticket", message, code="missing_field")
    if not 1 <= len(body.ticket) <= MAX_TICKET_CHARS:
        raise invalid("ticket", f"ticket has {len(body.ticket)} characters; 1 to {MAX_TICKET_CHARS} are allowed")
    return body.ticket


async def _prefill(service: Service, job: Job, emit: Emit) -> dict[str, Any]:
    first, result = await service.prefill(job, emit)
    tokenizer = service.tokens.tokenizer
    return {
        "rid": job.rid,
        "ticket": job.ticket,
        "model": service.model_name,
        "first_token": _first_token(service, first),
        "finish_reason": result.finish_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
            "cached_tokens": result.usage.cached_tokens,
        },
        "timing_ms": timing_report(result.timing, decode=False),
        "handoff": handoff_report(result),
        "lease_s": result.lease_s,
        "prompt_logprobs": native_entries(tokenizer, result.prompt_logprobs),
    }


def _first_token(service: Service, first: Tokens) -> dict[str, Any]:
    tokenizer = service.tokens.tokenizer
    if first.logprobs:
        return msgspec.structs.asdict(native_entry(tokenizer, first.logprobs[0]))
    token = first.tokens[0]
    return {"id": token, "text": tokenizer.piece(token), "logprob": None, "top_logprobs": None}


async def _stream(service: Service, job: Job, events: EventWriter) -> None:
    """Events: bootstrapped, progress {done, total}, transferring, done (the response)."""

    async def emit(event: Progress | Delta) -> None:
        if isinstance(event, Progress):
            name = "progress" if event.phase == "computing" else event.phase
            await events.data({"rid": job.rid, "done": event.done, "total": event.total}, name)

    await events.data(await _prefill(service, job, emit), "done")


async def _tell(events: EventWriter, info: ErrorInfo) -> None:
    """The error event repeats the status, which the response's head can no longer carry."""
    body = error_body(info)
    error = body["error"]
    assert isinstance(error, dict)
    await events.data({"error": {**error, "status": info.status}}, "error")
