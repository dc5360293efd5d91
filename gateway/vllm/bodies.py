"""Request bodies as a gateway reads them, and what decode engines are asked of them. Pure.

A handoff depends on the fields that are declared here; all others are the decode engine's. So that a prompt becomes the
token ids that an engine would compute, it is asked: POST /tokenize. vLLM's /tokenize renders conversations as its chat
route does, with fewer fields: what the chat route merges into chat_template_kwargs
(ChatCompletionRequest.build_chat_params) is merged here.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace.core.types.errors import HeadraceError, invalid
from headrace.core.types.requests.kv_hints import KvHintsEnvelope
from headrace.gateway.metrics import RecomputeReason
from headrace.server.http.ranges import Priority, TokenId

TEXT_PARTS = ("text", "refusal", "thinking", "input_text", "output_text")
"""Types of content parts that are text."""
MAX_CHOICES = 1024
_PASSED = (
    "model", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
    "add_special_tokens",
)  # fmt: skip
_MERGED = ("documents", "reasoning_effort")
_NULL = b"null"
TokenizeBody = Mapping[str, object]
ChoiceCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]


class GatewayParams(msgspec.Struct, kw_only=True):
    """kv_transfer_params: the fields that tell a prefill side what it is asked for."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None


class GatewayBody(msgspec.Struct, kw_only=True):
    """Fields of both routes."""

    model: str | None = None
    n: ChoiceCount | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: str | None = None
    priority: Priority | None = None
    kv_hints: KvHintsEnvelope | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    kv_transfer_params: GatewayParams | None = None

    @property
    def media(self) -> bool:
        """Whether the prompt is more than text."""
        return False

    def recompute_reason(self) -> RecomputeReason | None:
        """Why its prompt's KV cannot be handed over, as far as the body says."""
        if self.use_beam_search:
            return "beam_search"
        if self.echo:
            return "echo"
        if self.prompt_logprobs is not None:
            return "prompt_logprobs"
        if self.truncate_prompt_tokens is not None:
            return "truncation"
        return "media" if self.media else None


class GatewayCompletion(GatewayBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def media(self) -> bool:
        """Whether there are embeddings in the place of a prompt."""
        return self.prompt_embeds is not None

    def recompute_reason(self) -> RecomputeReason | None:
        """See GatewayBody."""
        return "suffix" if self.suffix is not None else super().recompute_reason()

    def texts(self) -> list[str]:
        """The prompts that are texts. Raises HeadraceError (400) if there are none."""
        found = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        texts = [item for item in found if isinstance(item, str)]
        if not texts:
            raise invalid("prompt", "prompt is required", code="missing_field")
        return texts

    def token_ids(self) -> list[list[int]] | None:
        """The prompts, if they are token ids; None for texts. Raises HeadraceError (400) for a prompt of both."""
        if not isinstance(self.prompt, list) or not self.prompt:
            return None
        kinds = {type(item) for item in self.prompt}
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        if kinds == {list}:
            return [item for item in self.prompt if isinstance(item, list)]
        if kinds == {str}:
            return None
        raise invalid("prompt", "prompt: the items of a list have to be all texts, all token ids, or all lists of ids")


class GatewayMessage(msgspec.Struct):
    """One message of a conversation."""

    content: str | list[Any] | None = None


class GatewayChat(GatewayBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[GatewayMessage]

    @property
    def media(self) -> bool:
        """Whether a part of a message is no text."""
        return any(
            isinstance(part, dict) and part.get("type", "text") not in TEXT_PARTS
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
        )


class GatewayExtraArgs(msgspec.Struct):
    """extra_args of sampling_params."""

    kv_transfer_params: GatewayParams | None = None


class GatewaySampling(msgspec.Struct):
    """sampling_params of token ids."""

    n: ChoiceCount | None = None
    prompt_logprobs: int | None = None
    extra_args: GatewayExtraArgs | None = None


class GatewayTokens(GatewayBody, kw_only=True):
    """Body of POST /inference/v1/generate. What other bodies have in their fields is in sampling_params."""

    token_ids: list[TokenId]
    sampling_params: GatewaySampling | None = None
    features: Any = None
    content_parts: Any = None

    def __post_init__(self) -> None:
        """kv_transfer_params of the body go before those of extra_args, as in vLLM."""
        given = self.sampling_params or GatewaySampling()
        self.n, self.prompt_logprobs = given.n, given.prompt_logprobs
        if self.kv_transfer_params is None and given.extra_args is not None:
            self.kv_transfer_params = given.extra_args.kv_transfer_params

    @property
    def media(self) -> bool:
        """Whether the prompt is more than text."""
        return bool(self.features or self.content_parts)


AnyGatewayBody = GatewayCompletion | GatewayChat | GatewayTokens


def require_remote_decode(body: GatewayBody) -> None:
    """Raises HeadraceError for a body that asks this gateway for something else than a prefill."""
    params = body.kv_transfer_params
    if params is not None and params.do_remote_prefill:
        message = "kv_transfer_params.do_remote_prefill asks a decode engine; this gateway stands for prefill servers"
        raise invalid("kv_transfer_params.do_remote_prefill", message)
    if params is None or not params.do_remote_decode:
        raise wrong_place()


def wrong_place() -> HeadraceError:
    """The error of a request for a text."""
    message = (
        "a gateway decodes nothing: send requests to a router in front of it and of the decode engines, which asks "
        "here with kv_transfer_params.do_remote_decode"
    )
    return invalid("kv_transfer_params", message, code="wrong_role", status=404)


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
