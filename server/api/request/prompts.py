"""Prompts of request bodies as token ids, checked against the model's limits."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import msgspec

from headrace.core.types.errors import MODEL_NOT_FOUND, ErrorInfo, HeadraceError, invalid, shown
from headrace.server.api.request.reasoning import reasoning_of
from headrace.server.api.request.schema import (
    CalledFunction,
    ChatBody,
    ChatMessage,
    CompletionBody,
    Function,
    InputItem,
    Part,
    PrefillBody,
    ResponsesBody,
    TokenizeBody,
    ToolCall,
)
from headrace.server.api.request.tools import (
    check_arguments,
    check_results,
    checked_arguments,
    template_calls,
    template_tools,
    tool_use,
)
from headrace.server.frontend.request.images import GivenImage, RequestImage
from headrace.server.frontend.served_model import ServedModel
from headrace.text.chat_template import RESERVED, TemplateUse
from headrace.text.tokenizer import too_long

MAX_PROMPTS = 256  # in one HTTP request
MAX_VARIABLE = 64  # characters of the name of a variable of a chat template
MANY_IDS = 1 << 10
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")  # all but the first in /v1/responses
IMAGE_PARTS = ("image_url", "input_image")  # the latter in /v1/responses
NO_IMAGES: tuple[RequestImage, ...] = ()
Prompt = str | list[int]  # a text, or token ids
OpenBody = PrefillBody | ChatBody | CompletionBody  # of a prompt that may be open
Encoded = tuple[tuple[int, ...], tuple[RequestImage, ...]]
"""Token ids of a prompt, and its images with their places."""
_ITEM_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content", "name"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content",),
}
_OPTIONAL = ("message", "reasoning")  # types of items whose fields may be left out


def check_model(model: ServedModel, name: str | None) -> None:
    """Raises HeadraceError (404) if the body names another model than the one served, and none of its adapters."""
    if name is not None and name not in model.names and name not in model.adapters:
        message = f"model {shown(name)!r} is not served here; this is {model.name!r}"
        if model.adapters:
            message += f" with adapters {shown(', '.join(model.adapters), 300)}"
        raise HeadraceError(ErrorInfo(code=MODEL_NOT_FOUND, message=message, status=404, field="model"))


def completion_prompts(prompt: str | Sequence[str | int | list[int]], limit: int = 0) -> list[Prompt]:
    """Prompts of a completions body: a text, token ids, a list of texts, or a list of lists of token ids. limit: tokens
    of one prompt; more are not looked at, since encode() refuses them; 0 for none. Raises HeadraceError (400) for an
    empty or mixed list, or too many prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt", "prompt is empty", code="empty_prompt")
    if isinstance(prompt[0], int) and 0 < limit <= len(prompt):
        return [cast(list[int], prompt)]
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise invalid("prompt", "prompt mixes texts, token ids and lists; send one kind", code="invalid_type")
    if kinds == {int}:
        return [cast(list[int], prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompt)} prompts; at most {MAX_PROMPTS} fit in one request")
    return cast(list[Prompt], prompt)


async def encode_all(
    model: ServedModel, prompts: Sequence[Prompt], field: str, *, indexed: bool
) -> list[tuple[int, ...]]:
    """Token ids of several prompts. indexed: name them as items of the field in errors. Raises HeadraceError (400) as
    encode() does."""
    names = [f"{field}[{index}]" if indexed else field for index in range(len(prompts))]
    return [await encode(model, prompt, name) for prompt, name in zip(prompts, names, strict=True)]


async def encode(model: ServedModel, prompt: Prompt, field: str) -> tuple[int, ...]:
    """Token ids of one prompt. Raises HeadraceError (400) for an empty or too long prompt, and for token ids outside
    the vocabulary."""
    if not prompt:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    if isinstance(prompt, str):
        return _checked(model, await model.tokens.encode(prompt, field), field)
    if len(prompt) > MANY_IDS:
        await asyncio.sleep(0)  # one request may have many such prompts, and others are waiting
    return _checked(model, prompt, field)


async def encode_chat(
    model: ServedModel,
    messages: Sequence[ChatMessage],
    field: str = "messages",
    *,
    instructions: str | None = None,
    functions: Mapping[str, Function] = MappingProxyType({}),
    places: Sequence[str] = (),
    use: TemplateUse = TemplateUse(),  # noqa: B008 - immutable
) -> Encoded:
    """Token ids of a conversation in the model's chat template, and its images.

    field: its name in errors. instructions: a system message before all others. functions: that it may call. places:
    names of the messages in errors, if they are not the items of the field; then results of calls have been checked.
    use: see template_use(). Raises HeadraceError (400, 413) as encode() does, for content other than text and images
    of users, and for images that are not taken (ImageReader).
    """
    plain, places = await _plain_messages(model, messages, field, places)
    if instructions:
        plain.insert(0, {"role": "system", "content": instructions})
    tools = template_tools(functions)
    given = list(_given_images(messages, places))
    if not given:
        return _checked(model, await model.tokens.encode_chat(plain, field, tools, use), field), NO_IMAGES
    reader = model.images(given[0].field)
    images = await reader.read(given)
    ids, images = reader.tokens.expanded(await model.tokens.encode_chat(plain, field, tools, use), images, field)
    return _checked(model, ids, field), images


async def encode_open(model: ServedModel, body: OpenBody) -> tuple[tuple[int, ...], int]:
    """Token ids of a prompt that is to grow, and how many of them are not expected to change then. Raises HeadraceError
    (400) as encode_any() does, for images, and for several prompts."""
    field = prompt_field(body)
    if isinstance(body, CompletionBody):
        prompt, *others = completion_prompts(body.prompt)
        if others:
            raise invalid("prompt", "an open prompt is one prompt; send one text, or its token ids", code="unsupported")
    elif body.messages is not None:
        plain, places = await _plain_messages(model, body.messages, field)
        for given in _given_images(body.messages, places):
            raise invalid(given.field, f"{given.field}: an open prompt has no images", code="unsupported")
        tools = tool_use(model, body) if isinstance(body, ChatBody) else None
        functions = template_tools(tools.functions if tools else {})
        ids, stable = await model.tokens.encode_open_chat(plain, field, functions, template_use(body))
        return _checked(model, ids, field), stable
    else:
        prompt = body.prompt or body.prompt_token_ids or ""
    if isinstance(prompt, str) and prompt:
        ids, stable = await model.tokens.encode_open(prompt, field)
        return _checked(model, ids, field), stable
    tokens = await encode(model, prompt, field)
    return tokens, len(tokens)


def prompt_field(body: OpenBody) -> str:
    """The field that has the prompt. Raises HeadraceError (400) unless there is exactly one, of POST /v1/prefill."""
    if not isinstance(body, PrefillBody):
        return "messages" if isinstance(body, ChatBody) else "prompt"
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
    return names[0]


async def _plain_messages(
    model: ServedModel, messages: Sequence[ChatMessage], field: str, places: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], Sequence[str]]:
    """Checked messages as chat templates expect them, and their names in errors. places: see encode_chat()."""
    if not messages:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    await check_arguments((call.function.arguments for each in messages for call in each.tool_calls or ()), field)
    if not places:
        check_results(messages, field)
        places = [f"{field}[{index}]" for index in range(len(messages))]
    plain = [_plain(model, message, place) for message, place in zip(messages, places, strict=True)]
    return plain, places


def response_template_use(body: ResponsesBody) -> TemplateUse:
    """What a body of POST /v1/responses asks of the chat template."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    return TemplateUse(_effort(effort)) if effort is not None else TemplateUse()


def _effort(effort: str) -> dict[str, Any]:
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def template_use(body: ChatBody | PrefillBody | TokenizeBody) -> TemplateUse:
    """What a body asks of the chat template. Raises HeadraceError (400) for variables that are given by other fields,
    and for fields that contradict each other."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        field = f"chat_template_kwargs.{shown(name)}"
        if name in RESERVED:
            raise invalid(field, f"{field}: send {name} beside chat_template_kwargs, if it is a field of this body")
        if not name.isidentifier() or len(name) > MAX_VARIABLE:
            raise invalid(field, f"{field}: no template has a variable of this name")
    if body.reasoning_effort is not None:
        variables = {**_effort(body.reasoning_effort), **variables, "reasoning_effort": body.reasoning_effort}
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt contradict each other; send one of them"
        raise invalid("continue_final_message", message)
    return TemplateUse(variables, body.add_generation_prompt is not False, continues)


async def encode_reported(
    model: ServedModel, ids: list[int], messages: Sequence[ChatMessage], field: str, places: Sequence[str] = ()
) -> Encoded:
    """A conversation whose token ids the prefill server has reported, with all tokens of its images. field, places: see
    encode_chat(). Raises HeadraceError as that does."""
    tokens = await encode(model, ids, "prompt")
    given = list(_given_images(messages, places or [f"{field}[{index}]" for index in range(len(messages))]))
    if not given:
        return tokens, NO_IMAGES
    reader = model.images(given[0].field)
    return tokens, reader.tokens.located(tokens, await reader.read(given), field)


async def encode_any(model: ServedModel, body: PrefillBody) -> Encoded:
    """Token ids and images of the prompt of POST /v1/prefill. Raises HeadraceError (400) unless it is given in exactly
    one of the three fields, and as encode_chat() does."""
    prompt_field(body)
    if body.images and body.prompt_token_ids is None:
        raise invalid("images", "images are those of prompt_token_ids; in messages they are parts of type image_url")
    if body.messages is not None:
        return await encode_chat(model, body.messages, use=template_use(body))
    if body.prompt is not None:
        return await encode(model, body.prompt, "prompt"), NO_IMAGES
    ids = await encode(model, body.prompt_token_ids or [], "prompt_token_ids")
    if not body.images:
        return ids, NO_IMAGES
    images = [GivenImage(f"images[{index}]", url) for index, url in enumerate(body.images)]
    reader = model.images(images[0].field)
    return ids, reader.tokens.located(ids, await reader.read(images), "prompt_token_ids")


def _checked(model: ServedModel, ids: Sequence[int], field: str) -> tuple[int, ...]:
    if not ids:
        raise invalid(field, f"{field} is empty", code="empty_prompt")
    limit, vocab = model.max_model_len, model.vocab_size
    if limit and len(ids) >= limit:
        raise too_long(field, f"{len(ids)} tokens", limit)
    check_ids(ids, field, vocab)
    return tuple(ids)


def check_ids(ids: Sequence[int], field: str, vocab: int) -> None:
    """Raises HeadraceError (400) for the first id that is outside the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab):
        index, token = next((index, token) for index, token in enumerate(ids) if not 0 <= token < vocab)
        message = f"{field}[{index}] is token id {token}, outside the vocabulary of {vocab}"
        raise invalid(f"{field}[{index}]", message, code="invalid_token")


def _plain(model: ServedModel, message: ChatMessage, place: str) -> dict[str, Any]:
    """A message as chat templates expect it, its text parts joined unless there are images between them. place: its
    name in errors."""
    role = _role(message, place)
    content: Any = message.content or message.refusal or ""
    if role == "user" and not isinstance(content, str) and any(map(_is_image, content)):
        content = [_shown_part(part, f"{place}.content[{number}]") for number, part in enumerate(content)]
    else:
        content = _joined(content, place)
    more = {} if message.name is None else {"name": message.name}
    if message.tool_call_id is not None:
        more["tool_call_id"] = message.tool_call_id
    calls = template_calls(message, place, model.call_form) if message.tool_calls else {}
    # Templates tell an answer that is calls alone by its lack of content.
    return {"role": role, "content": content or (None if calls else ""), **more, **calls, **reasoning_of(message)}


def _is_image(part: Part) -> bool:
    return part.type in IMAGE_PARTS


def _shown_part(part: Part, place: str) -> dict[str, str]:
    """A part as chat templates expect it. Raises HeadraceError (400) for one that is neither text nor an image."""
    return {"type": "image"} if _is_image(part) else {"type": "text", "text": _text(part, place)}


def _given_images(messages: Sequence[ChatMessage], places: Sequence[str]) -> Iterator[GivenImage]:
    """The images of a conversation. Raises HeadraceError (400) for an image part without one."""
    for message, place in zip(messages, places, strict=True):
        if isinstance(message.content, str):
            continue
        for number, part in enumerate(message.content or ()):
            if not _is_image(part):
                continue
            field = f"{place}.content[{number}].image_url"
            if part.text is not None:
                field = field.removesuffix("image_url") + "text"
                raise invalid(field, f"{field}: a part that is an image has no text; send it as a part of its own")
            if part.image_url is None:
                raise invalid(field, f"{field} is required", code="missing_field")
            if isinstance(part.image_url, str):
                yield GivenImage(field, part.image_url)
            else:
                yield GivenImage(f"{field}.url", part.image_url.url)


def _joined(content: str | list[Part], place: str) -> str:
    """Raises HeadraceError (400) for a part that is no text."""
    if isinstance(content, str):
        return content
    return "".join(_text(part, f"{place}.content[{number}]") for number, part in enumerate(content))


def _text(part: Part, place: str) -> str:
    """Raises HeadraceError (400) for a part that is no text."""
    text = part.refusal if part.type == "refusal" else part.text if part.type in TEXT_PARTS else None
    if text is not None and part.image_url is not None:
        message = f"{place}.image_url: a part of type {shown(part.type)!r} has no image; write type image_url"
        raise invalid(f"{place}.image_url", message)
    if text is None:
        message = f"{place} is of type {shown(part.type)!r}; only text is supported, and images of users"
        raise invalid(place, message, code="unsupported")
    return text


def _role(message: ChatMessage, place: str) -> str:
    """Raises HeadraceError (400) for a role that chat templates do not have."""
    if message.role == "developer":  # OpenAI's newer name
        return "system"
    if message.role not in ROLES:
        text = f"{place}.role is {shown(message.role)!r}; it has to be {', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise invalid(f"{place}.role", text)
    return message.role


async def input_messages(body: ResponsesBody) -> tuple[list[ChatMessage], list[str]]:
    """The messages, and the item of the input that each begins with. Calls become a message of the assistant with
    tool_calls, results one of role tool; reasoning is that of the message which follows. Raises HeadraceError (400) for
    other items, and for calls and results that are wrong."""
    if isinstance(body.input, str):
        return ([ChatMessage("user", body.input)], ["input"]) if body.input else ([], [])
    await check_arguments((item.arguments for item in body.input), "input")
    messages: list[ChatMessage] = []
    places: list[str] = []
    made: set[str] = set()
    thought: str | None = None
    for index, item in enumerate(body.input):
        place = f"input[{index}]"
        _check_item(item, place)
        if item.type == "reasoning":
            thought = _joined(item.content or "", place)
            continue
        if item.type == "function_call":
            call = ToolCall(item.call_id or "", CalledFunction(item.name or "", item.arguments))
            checked_arguments(call, f"{place}.call_id", place)
            made.add(call.id)
            if messages and messages[-1].role == "assistant" and not thought:
                calls = [*(messages[-1].tool_calls or ()), call]
                messages[-1] = msgspec.structs.replace(messages[-1], tool_calls=calls)
                continue
            messages.append(ChatMessage("assistant", tool_calls=[call], reasoning_content=thought))
        elif item.type == "function_call_output":
            if item.call_id not in made:
                text = f"{place}.call_id is {shown(item.call_id or '')!r}, which no function_call before it has"
                raise invalid(f"{place}.call_id", text)
            messages.append(ChatMessage("tool", item.output, tool_call_id=item.call_id))
        else:
            messages.append(ChatMessage(item.role, item.content, item.name, reasoning_content=thought))
        thought = None
        places.append(place)
    return messages, places


def _check_item(item: InputItem, place: str) -> None:
    """Raises HeadraceError (400) for an item of another type, and for fields that one of its type lacks or has not."""
    fields = _ITEM_FIELDS.get(item.type)
    if fields is None:
        *most, last = _ITEM_FIELDS
        text = f"{place} is of type {shown(item.type)!r}; it has to be {', '.join(most)} or {last}"
        raise invalid(place, text, code="unsupported")
    for name, given in msgspec.structs.asdict(item).items():
        if name != "type" and name not in fields and given:
            raise invalid(f"{place}.{name}", f"{place}.{name} is no field of an item of type {item.type}")
        if name in fields and given is None and item.type not in _OPTIONAL:
            raise invalid(f"{place}.{name}", f"{place}.{name} is required", code="missing_field")
