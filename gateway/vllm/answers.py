"""Answers to a router's prefill request: vLLM's completion of one token, with kv_transfer_params if there is KV."""

from typing import Any

import msgspec

from headrace.core.types.requests.request import Usage
from headrace.server.api.response.usage import usage_report


class HandoffAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer is made of."""

    request_id: str
    created: int
    """Unix time in seconds."""
    model: str
    usage: Usage
    choices: int
    """n of each prompt, prompts × n in all. They are empty: the decode engine samples the first token, too."""
    params: dict[str, Any] | None
    """kv_transfer_params; None: the decode engine computes the prompt."""


def completion(answer: HandoffAnswer) -> dict[str, Any]:
    """The body of POST /v1/completions."""
    choices = [
        {"index": index, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        for index in range(answer.choices)
    ]
    return _body(answer, "cmpl", "text_completion", choices)


def chat_completion(answer: HandoffAnswer) -> dict[str, Any]:
    """The body of POST /v1/chat/completions."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        for index in range(answer.choices)
    ]
    return _body(answer, "chatcmpl", "chat.completion", choices)


def _body(answer: HandoffAnswer, prefix: str, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = {
        "id": f"{prefix}-{answer.request_id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": usage_report([answer.usage], answer.usage.completion_tokens),
    }
    return body if answer.params is None else {**body, "kv_transfer_params": answer.params}
