"""What clients do with an open prompt, apart from the routes by which they do it. Its content is the body that opened
it, with all that was appended."""

import secrets

import msgspec
from starlette.requests import Request

from headrace.core.config import ServerConfig
from headrace.core.types.errors import invalid
from headrace.core.types.requests.request import SamplingParams
from headrace.server.api.request.prompts import OpenBody, check_model, encode_open, prompt_field
from headrace.server.api.request.schema import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    GrowingBody,
    PrefillBody,
    PrefillFields,
    TruncateBody,
)
from headrace.server.api.request.terms import base_request, with_client_terms
from headrace.server.frontend.open_prompts.open_prompts import OpenPrompt, OpenPrompts
from headrace.server.frontend.served_model import ServedModel
from headrace.server.upstream.handoff_params import MAX_TICKET_CHARS, TokenId

Appended = str | list[TokenId | ChatMessage]


async def open_prompt(
    model: ServedModel, prompts: OpenPrompts, config: ServerConfig, http: Request, body: OpenBody
) -> OpenPrompt:
    """Open a prompt. Raises HeadraceError (400, 404, 429)."""
    check_model(model, body.model)
    ticket = _ticket(config, body) if isinstance(body, PrefillBody) else None
    tokens, stable = await encode_open(model, body)
    request = with_client_terms(base_request("", body, SamplingParams(), None), http, config)
    terms = msgspec.structs.replace(request.terms, deadline_s=None, slo_ttft_s=None)
    request = msgspec.structs.replace(request, terms=terms, observer=None, stop=())
    prompt = prompts.open(request, ticket, body)
    prompts.change(prompt, body, tokens, stable)
    return prompt


async def append(model: ServedModel, prompts: OpenPrompts, prompt: OpenPrompt, more: Appended) -> None:
    """Append to a prompt, which stays as it is if that is refused. Raises HeadraceError (400, 404, 409)."""
    async with prompt.lock:
        await change(model, prompts, prompt, appended(prompt.content, more))


def appended(body: OpenBody, more: Appended, field: str = "append") -> OpenBody:
    """The body of a prompt that goes on. Raises HeadraceError (400) for another kind of prompt than it has begun as."""
    name = prompt_field(body)
    before = getattr(body, name)
    kind = "a text" if isinstance(before, str) else "messages" if name == "messages" else "token ids"
    wanted = str if kind == "a text" else ChatMessage if kind == "messages" else int
    if isinstance(more, str) != isinstance(before, str) or not (
        isinstance(more, str) or all(isinstance(each, wanted) for each in more)
    ):
        raise invalid(field, f"{field} has to be {kind}, as the prompt has begun", code="invalid_type")
    return msgspec.structs.replace(body, **{name: before + more})


async def truncate(model: ServedModel, prompts: OpenPrompts, prompt: OpenPrompt, body: TruncateBody) -> None:
    """Go back to an earlier position of a prompt, which stays open. Raises HeadraceError (400, 404, 409)."""
    if (body.tokens is None) == (body.messages is None):
        raise invalid("tokens", "send exactly one of tokens and messages", code="missing_field")
    async with prompt.lock:
        content: OpenBody = prompt.content
        name = prompt_field(content)
        whole = getattr(content, name)
        if body.messages is not None:
            if name != "messages":
                raise invalid("messages", f"the prompt is given as {name}: send tokens")
            end, kept = len(whole), whole[: body.messages]
            field, left = "messages", body.messages
        else:
            assert body.tokens is not None, "one of both is given"
            if name == "messages":
                raise invalid("tokens", "the prompt is given as messages: send messages, how many of them stay")
            end, field, left = len(prompt.tokens), "tokens", body.tokens
            kept = whole[:left] if not isinstance(whole, str) else await model.tokens.cut(whole, left)
        if not 1 <= left <= end:
            raise invalid(field, f"{field} is {left}; the prompt has {end}, of which 1 to {end} may stay")
        await change(model, prompts, prompt, msgspec.structs.replace(content, **{name: kept}))


def continued(before: OpenBody, body: GrowingBody) -> OpenBody:
    """The body of an open prompt that this one is appended to, with the fields of this one in the place of earlier
    ones. Raises HeadraceError (400) for a prompt that was opened by another route, or as another kind."""
    if type(before) is not type(body) or not isinstance(body, ChatBody | CompletionBody):
        raise invalid("headrace.open_id", "the prompt was opened by another route", code="wrong_route")
    name = prompt_field(body)
    given = {key: value for key, value in msgspec.structs.asdict(body).items() if value is not None and key != name}
    more = body.messages if isinstance(body, ChatBody) else body.prompt
    return appended(msgspec.structs.replace(before, **given), more, name)  # type: ignore[arg-type]


def committed(prompt: OpenPrompt, fields: PrefillFields) -> PrefillBody:
    """The body of POST /v1/prefill that a commit with these fields stands for. Raises HeadraceError (400) for a prompt
    that was opened by another route."""
    content = prompt.content
    if not isinstance(content, PrefillBody):
        raise invalid("id", "the prompt was opened by another route; commit it there", code="wrong_route")
    given = {name: value for name, value in msgspec.structs.asdict(fields).items() if value is not None}
    if prompt.ticket is not None and given.get("handoff") != "none":
        given.setdefault("ticket", prompt.ticket)
    return msgspec.structs.replace(content, **given, open=None)


def _ticket(config: ServerConfig, body: PrefillBody) -> str | None:
    """The ticket of the commit, which a prefill server makes up if none is given. Raises HeadraceError (400)."""
    if body.images:
        raise invalid("images", "an open prompt has no images", code="unsupported")
    if body.ticket is not None and not 1 <= len(body.ticket) <= MAX_TICKET_CHARS:
        raise invalid("ticket", f"ticket has {len(body.ticket)} characters; 1 to {MAX_TICKET_CHARS} are allowed")
    makes_one = config.role == "prefill" and body.handoff != "none"
    return body.ticket or (secrets.token_hex(16) if makes_one else None)


async def change(model: ServedModel, prompts: OpenPrompts, prompt: OpenPrompt, content: OpenBody) -> None:
    """Give a prompt this content. Raises HeadraceError (400, 404, 409), and then it stays as it is."""
    tokens, stable = await encode_open(model, content)
    prompts.change(prompt, content, tokens, stable)
