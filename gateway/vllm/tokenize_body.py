"""What decode engines are asked so that a prompt becomes the token ids that they would compute: POST /tokenize. Pure.

vLLM's /tokenize renders conversations as its chat route does, with fewer fields: what the chat route merges into
chat_template_kwargs (ChatCompletionRequest.build_chat_params) is merged here.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.types.errors import invalid

_PASSED = (
    "model", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
_MERGED = ("documents", "reasoning_effort")
_NULL = b"null"
TokenizeBody = Mapping[str, object]


def text_to_tokenize(model: str | None, text: str, add_special_tokens: bool | None) -> TokenizeBody:
    """The body for a text."""
    body: dict[str, object] = {"model": model, "prompt": text}
    return body if add_special_tokens is None else {**body, "add_special_tokens": add_special_tokens}


def chat_to_tokenize(raw: bytes | bytearray) -> TokenizeBody:
    """The body for the conversation of a chat request. Raises HeadraceError (400)."""
    given: dict[str, msgspec.Raw] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    fields = {name: value for name, value in given.items() if bytes(value) != _NULL}
    body: dict[str, object] = {name: fields[name] for name in _PASSED if name in fields}
    kwargs = _template_kwargs(fields)
    return {**body, "chat_template_kwargs": kwargs} if kwargs else body


def _template_kwargs(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """chat_template_kwargs with the fields that the chat route adds: they take the place of the client's."""
    try:
        kwargs = msgspec.json.decode(fields.get("chat_template_kwargs", b"{}"), type=dict[str, Any])
    except msgspec.ValidationError:
        raise invalid("chat_template_kwargs", "chat_template_kwargs: expected an object", code="invalid_type") from None
    found = {name: msgspec.json.decode(fields[name]) for name in _MERGED if name in fields}
    if "reasoning_effort" in found and "enable_thinking" not in kwargs:
        found["enable_thinking"] = found["reasoning_effort"] != "none"
    return {**kwargs, **found}
