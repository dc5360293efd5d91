"""A checked request for completions in any API, and its generation requests in either role."""

import secrets
from collections.abc import Sequence

import msgspec

from headrace.core.config import ServerConfig
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid
from headrace.server.api.request.reasoning import AnswerUse
from headrace.server.api.request.sampling import seeded
from headrace.server.frontend.request.generation_request import GenerationRequest
from headrace.server.upstream.handoff_params import (
    BOOTSTRAP_PORT,
    BatchShape,
    HandoffFields,
    KvSource,
    kv_sinks,
    kv_sources,
)


class CompletionRequest(msgspec.Struct, frozen=True):
    """The prompts of one HTTP request, and how to continue them."""

    base: GenerationRequest
    """What its generation requests have in common; its prompt is empty."""
    prompts: Sequence[tuple[int, ...]]
    """Token ids."""
    choices: int = 1
    """Continuations of each prompt."""
    salts: Sequence[str] = ()
    """Prefix-cache salt of each prompt; empty if all have that of base."""
    rids: Sequence[str] = ()
    """Request id of each prompt; empty if all have that of base."""
    answers: AnswerUse = AnswerUse(None, None)
    """How the texts are read."""
    list_response: bool = False
    """The response is a JSON list, which has no place for kv_transfer_params."""
    best: int | None = None
    """Choices of each prompt that are in the response, those of the highest mean logprob; None for all."""

    @property
    def returned(self) -> int:
        """Choices of each prompt in the response."""
        return self.choices if self.best is None else self.best

    @property
    def shape(self) -> BatchShape:
        """Numbers of prompts and choices."""
        return BatchShape(len(self.prompts), self.choices)

    def requests(self, max_model_len: int) -> list[GenerationRequest]:
        """One generation request for each prompt and choice, ordered prompt by prompt."""
        terms = self.base.terms
        each_terms = [msgspec.structs.replace(terms, cache_salt=salt) for salt in self.salts]
        rids = self.rids or [self.base.rid] * len(self.prompts)
        bases = [
            msgspec.structs.replace(self.base, prompt=prompt, terms=own, rid=rid)
            for prompt, own, rid in zip(self.prompts, each_terms or [terms] * len(rids), rids, strict=True)
        ]
        requests = [_choice(base, max_model_len, choice) for base in bases for choice in range(self.choices)]
        if len(requests) == 1:
            return requests
        return [msgspec.structs.replace(each, rid=f"{each.rid}-{index}") for index, each in enumerate(requests)]


def _choice(base: GenerationRequest, max_model_len: int, choice: int) -> GenerationRequest:
    """One of the choices of a prompt. max_tokens is cut to the room that the prompt leaves."""
    room = max_model_len - len(base.prompt) if max_model_len else base.sampling.max_tokens
    tokens = min(base.sampling.max_tokens, room)
    sampling = msgspec.structs.replace(
        seeded(base.sampling, choice), max_tokens=tokens, min_tokens=min(base.sampling.min_tokens, tokens)
    )
    return msgspec.structs.replace(base, sampling=sampling)


def prefill_requests(completion: CompletionRequest, body: HandoffFields, max_model_len: int) -> list[GenerationRequest]:
    """The generation requests on a prefill server, with their tickets. Raises HeadraceError: 404 if the body names no
    handoff, since a prefill server does not decode; 400 for a wrong one."""
    sinks = kv_sinks(body, completion.shape, secrets.token_hex(16))
    if sinks is None:
        message = (
            "a prefill server does not decode: send kv_transfer_params.do_remote_decode or bootstrap_room as a router "
            "does, use POST /v1/prefill, or ask a decode server"
        )
        raise HeadraceError(ErrorInfo(code="wrong_role", message=message, status=404))
    params = body.kv_transfer_params
    # A ticket that the server makes up and the response cannot tell would only hold pages until its lease ends.
    if completion.list_response and sinks[0].hold and params is not None and params.transfer_id is None:
        sinks = [msgspec.structs.replace(sink, ticket=None, hold=False) for sink in sinks]
    return [
        msgspec.structs.replace(request, ticket=sink.ticket, hold=sink.hold)
        for request, sink in zip(completion.requests(max_model_len), sinks, strict=True)
    ]


def decode_requests(
    completion: CompletionRequest, body: HandoffFields, max_model_len: int, config: ServerConfig
) -> list[GenerationRequest]:
    """The generation requests on a server that decodes, with their KV sources if it is a decode server. Raises
    HeadraceError (400) for wrong handoff fields."""
    requests = completion.requests(max_model_len)
    sources = request_sources(body, completion.shape, config) if config.role == "decode" else None
    if completion.base.sampling.hidden_states is not None and any(each.address for each in sources or ()):
        message = "hidden states of a prompt that was sent to a prefill server are in that server's response"
        raise invalid("return_hidden_states", message, code="unsupported")
    if sources is None:
        return requests
    return [_with_source(request, source) for request, source in zip(requests, sources, strict=True)]


def request_sources(body: HandoffFields, shape: BatchShape, config: ServerConfig) -> list[KvSource] | None:
    """KV sources that a body names, None if it names none. Raises HeadraceError (400)."""
    return kv_sources(body, shape, config.bootstrap_port or BOOTSTRAP_PORT)


def _with_source(request: GenerationRequest, source: KvSource) -> GenerationRequest:
    """Without prompt logprobs: they are in the prefill server's response, which the router gets."""
    sampling = msgspec.structs.replace(request.sampling, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling, kv_source=source)
