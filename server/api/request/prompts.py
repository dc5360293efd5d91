"""From what a body calls a prompt to checked token ids."""

from collections.abc import Sequence
from typing import Any

from headrace.core.types.errors import TOO_LONG, ErrorInfo, HeadraceError, invalid
from headrace.server.api.request.schema import ChatMessage, PrefillBody
from headrace.server.frontend.service import Service

MAX_PROMPTS = 256
TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two in /v1/responses
Prompt = str | list[int]


def check_model(service: Service, model: str | None) -> None:
    """Raises HeadraceError (404) when the body names another model than the one served."""
    if model is not None and model not in service.model_names:
        message = f"model {model!r} is not served here; this is {service.model_name!r}"
        raise HeadraceError(ErrorInfo(code="model_not_found", message=message, status=404, field="model"))


def completion_prompts(prompt: str | Sequence[str | int | list[int]]) -> list[Prompt]:
    """The one or several prompts of a completions body: a text, ids, a list of texts, a list of lists of ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "prompt is empty", code="empty_prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(ids), len(texts), len(lists)):
        raise invalid("prompt", "prompt mixes texts, token ids and lists; send one kind", code="invalid_type")
    if ids:
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} fit in one request")
    return [*texts, *lists]


async def encode(service: Service, prompt: Prompt, field: str) -> tuple[int, ...]:
    """Token ids of one prompt. Raises HeadraceError (400) for an empty or overlong one and for foreign ids."""
    if not prompt:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    ids = await service.tokens.encode(prompt) if isinstance(prompt, str) else prompt
    return _checked(service, ids, field)


async def encode_chat(
    service: Service, messages: Sequence[ChatMessage], field: str = "messages", *, instructions: str | None = None
) -> tuple[int, ...]:
    """Token ids of a conversation in the model's chat template. field: where the body has it. instructions: of the
    system, before all messages."""
    if not messages:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    plain = [_plain(message, f"{field}[{index}]") for index, message in enumerate(messages)]
    if instructions:
        plain.insert(0, {"role": "system", "content": instructions})
    return _checked(service, await service.tokens.encode_chat(plain), field)


async def encode_any(service: Service, body: PrefillBody) -> tuple[int, ...]:
    """Token ids of the one prompt that a native body gives in one of three ways."""
    given = {
        "prompt": body.prompt is not None,
        "prompt_token_ids": body.prompt_token_ids is not None,
        "messages": body.messages is not None,
    }
    names = [name for name, there in given.items() if there]
    if len(names) != 1:
        problem = f"{' and '.join(names)} are given together" if names else "no prompt is given"
        message = f"{problem}; send exactly one of prompt, prompt_token_ids and messages"
        raise invalid(names[-1] if names else "prompt", message)
    if body.messages is not None:
        return await encode_chat(service, body.messages)
    if body.prompt is not None:
        return await encode(service, body.prompt, "prompt")
    return await encode(service, body.prompt_token_ids or [], "prompt_token_ids")


def _checked(service: Service, ids: Sequence[int], field: str) -> tuple[int, ...]:
    if not ids:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    limit, vocab = service.max_model_len, service.vocab_size
    if limit and len(ids) >= limit:
        message = f"{field} has {len(ids)} tokens; with one generated token the limit is {limit} (--max-model-len)"
        raise invalid(field, message, code=TOO_LONG)
    if min(ids) < 0 or max(ids) >= vocab:
        index, token = next((index, token) for index, token in enumerate(ids) if not 0 <= token < vocab)
        message = f"{field}[{index}] is token id {token}, outside the vocabulary of {vocab}"
        raise invalid(f"{field}[{index}]", message, code="invalid_token")
    return tuple(ids)


def _plain(message: ChatMessage, place: str) -> dict[str, Any]:
    """A message as chat templates expect it, its text parts joined."""
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type not in TEXT_PARTS or part.text is None:
                field = f"{place}.content[{number}]"
                raise invalid(field, f"{field} is of type {part.type!r}; only text is supported", code="unsupported")
        content = "".join(part.text or "" for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content or "", **named}
