"""Requests of a router: what a body asks for, its prompt as token ids, and the answer with KV or without."""

from typing import Any

import msgspec

from headrace.core.runtime.clock import Clock, wall_time
from headrace.core.types.errors import ErrorInfo, HeadraceError
from headrace.core.types.requests.request import Timing, Usage
from headrace.gateway.metrics import GatewayMetrics, RecomputeReason
from headrace.gateway.operations import unknown_model
from headrace.gateway.vllm.bodies import (
    AnyGatewayBody,
    GatewayBody,
    GatewayChat,
    GatewayCompletion,
    GatewayTokens,
    chat_to_tokenize,
    require_remote_decode,
    text_to_tokenize,
)
from headrace.gateway.vllm.engines import DecodeEngines
from headrace.gateway.vllm.handoff import NO_KV, SAMPLING, HandoffPrompt, Handoffs, KvOffer, LeftToEngine
from headrace.server.api.response.usage import usage_report
from headrace.server.frontend.request.generation_request import GenerationResult
from headrace.server.frontend.request_log import RequestRecord

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"
TOKENS_PATH = "/inference/v1/generate"


class Recompute(Exception):
    """The decode engine is to compute the prompt itself."""

    def __init__(self, reason: RecomputeReason, tokens: int = 0) -> None:
        """tokens: of the prompt, 0 if it is not known."""
        super().__init__(reason)
        self.reason = reason
        self.tokens = tokens


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


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is answered with."""

    answer: HandoffAnswer
    offer: KvOffer | None
    """The KV that the answer tells of."""


class Front:
    """Answers the prefill requests of routers.

    served_names: of the model. recompute: whether prompts that no prefill server can compute are the decode engine's.
    never: whether all prompts are.
    """

    def __init__(
        self,
        engines: DecodeEngines,
        handoffs: Handoffs,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        served_names: tuple[str, ...],
        recompute: bool,
        never: bool = False,
    ) -> None:
        self._engines = engines
        self._handoffs = handoffs
        self._metrics = metrics
        self._clock = clock
        self._served_names = served_names
        self._recompute = recompute
        self._never = never

    async def serve(self, body: AnyGatewayBody, raw: bytes | bytearray, record: RequestRecord) -> Served:
        """The answer to a body, which is also given as it came. Raises HeadraceError. Cancelling it gives up the prompt
        and its KV."""
        require_remote_decode(body)
        record.began(record.context.request_id, SAMPLING)
        offer, jobs, prompt_tokens = None, body.n or 1, 0
        try:
            try:
                prompt = await self._prompt(body, raw, record)
                jobs, prompt_tokens = prompt.jobs, len(prompt.tokens)
                began = self._clock.now()
                offer = await self._hand_over(prompt)
                self._metrics.took("prefill", self._clock.now() - began)
                self._metrics.handed_over(prompt_tokens)
                result = offer.result
            except Recompute as without:
                self._metrics.recomputed(without.reason)
                usage = Usage(prompt_tokens or without.tokens, 0, 0)
                result = GenerationResult(
                    finish_reason=None, usage=usage, timing=Timing(), kv=f"recomputed:{without.reason}"
                )
        except HeadraceError as error:
            record.failed(error.info)
            raise
        record.ended(result)
        answer = HandoffAnswer(
            request_id=record.context.request_id,
            created=int(wall_time()),
            model=body.model or self._served_names[0],
            usage=result.usage,
            choices=jobs,
            params=None if offer is None else _params(offer, prompt.tokens, chat=isinstance(body, GatewayChat)),
        )
        return Served(answer=answer, offer=offer)

    def sent(self, served: Served, seconds: float) -> None:
        """The answer was sent, which took so long."""
        self._metrics.took("send", seconds)

    def unsent(self, served: Served) -> None:
        """The client has gone, and does not get the answer."""
        if served.offer is not None:
            self._handoffs.withdraw(served.offer)

    async def _prompt(self, body: AnyGatewayBody, raw: bytes | bytearray, record: RequestRecord) -> HandoffPrompt:
        """The prompt of a body. Raises HeadraceError if it is wrong, Recompute if it cannot be handed over."""
        await self._check_model(body)
        if (reason := "never" if self._never else body.recompute_reason()) is not None:
            raise Recompute(reason)
        prompts = await self._token_ids(body, raw)
        for each in prompts:
            self._handoffs.check(each)
        if any(each != prompts[0] for each in prompts[1:]):
            raise Recompute("different_prompts", sum(map(len, prompts)))
        if not self._handoffs.fits(len(prompts[0])):
            raise Recompute("pool_too_small", len(prompts[0]))
        return HandoffPrompt(
            tokens=tuple(prompts[0]),
            jobs=len(prompts) * (body.n or 1),
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            session_id=body.session_id or body.prompt_cache_key or "",
            kv_hints=body.kv_hints,
            context=record.context,
        )

    async def _check_model(self, body: GatewayBody) -> None:
        """Raises HeadraceError (404) for a model that is not served, Recompute for an adapter."""
        if not body.model or body.model in self._served_names:
            return
        if await self._engines.has_adapter(body.model):
            raise Recompute("adapter")
        raise unknown_model(body.model, self._served_names)

    async def _token_ids(self, body: AnyGatewayBody, raw: bytes | bytearray) -> list[list[int]]:
        """Token ids of the prompts: as they are in the body, or as a decode engine makes them, so that both sides
        compute the same. Raises HeadraceError, Recompute."""
        count = 1
        if isinstance(body, GatewayTokens):
            return [body.token_ids]
        if isinstance(body, GatewayCompletion):
            if (given := body.token_ids()) is not None:
                return given
            texts = body.texts()
            if any(text != texts[0] for text in texts):
                raise Recompute("different_prompts")
            asked, count = text_to_tokenize(body.model, texts[0], body.add_special_tokens), len(texts)
        else:
            asked = chat_to_tokenize(raw)
        began = self._clock.now()
        tokens = await self._engines.client().tokenize(asked)
        self._metrics.took("tokenize", self._clock.now() - began)
        return [tokens] * count

    async def _hand_over(self, prompt: HandoffPrompt) -> KvOffer:
        """Raises HeadraceError; Recompute where the decode engine is to make up for it."""
        try:
            return await self._handoffs.hand_over(prompt)
        except LeftToEngine as left:
            raise Recompute(left.reason) from left
        except HeadraceError as error:
            if error.info.code == NO_KV:
                raise Recompute("no_kv") from error
            if self._recompute and _is_of_prefill_side(error.info):
                raise Recompute("prefill_failed") from error
            raise


def _is_of_prefill_side(error: ErrorInfo) -> bool:
    """Whether a prompt failed for reasons of the prefill servers, and not its own."""
    return error.status == 429 or error.status >= 500


def _params(offer: KvOffer, tokens: tuple[int, ...], *, chat: bool) -> dict[str, object]:
    """kv_transfer_params of an answer. A decode engine takes the token ids of a chat from there."""
    return {**offer.params, "prompt_token_ids": tokens} if chat else offer.params


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


def generated_tokens(answer: HandoffAnswer) -> dict[str, Any]:
    """The body of POST /inference/v1/generate."""
    choices: list[dict[str, Any]] = [
        {"index": index, "token_ids": [], "logprobs": None, "finish_reason": "length", "stop_reason": None}
        for index in range(answer.choices)
    ]
    return {
        "request_id": answer.request_id,
        "created": answer.created,
        "model": answer.model,
        "choices": choices,
        "usage": usage_report([answer.usage], answer.usage.completion_tokens),
        "output_mode": "tokens",
        "kv_transfer_params": answer.params,
    }


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
