"""What a decode server sends to POST /v1/prefill, and what of the response becomes part of its own."""

import json
from typing import Any

import msgspec

from headrace.core.messages.http_prefill import PrefillRequest
from headrace.core.types.errors import PREFILL_FAILED, ErrorInfo, HeadraceError
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.request import SamplingParams, Timing
from headrace.server.frontend.request.generation_request import GenerationRequest, GenerationResult
from headrace.server.frontend.request.hidden_states import joined
from headrace.server.upstream.prefill_call import PrefillResponse


def prefill_body(
    request: GenerationRequest,
    ticket: str,
    *,
    knows_start: bool,
    knows_hints: bool = False,
    knows_session_id: bool = False,
) -> PrefillRequest:
    """Body of POST /v1/prefill. The prefill server has the same tokenizer, so it merges stop strings as we do.
    knows_start: it takes prompt_logprobs_start, and does not compute the logprobs before it. knows_hints: it takes
    kv_hints. knows_session_id: it takes session_id, which is a digest here."""
    sampling, terms = msgspec.structs.asdict(request.sampling), request.terms
    sampling["logit_bias"] = {str(token): bias for token, bias in request.sampling.logit_bias}
    if not knows_start:
        del sampling["prompt_logprobs_start"]
    return PrefillRequest(
        **sampling,
        rid=request.rid,
        model=request.model if terms.adapter else None,
        adapter=terms.adapter or None,
        ticket=ticket,
        prompt_token_ids=request.prompt,
        images=[image.url for image in request.images] or None,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        priority=terms.priority,
        cache_salt=terms.cache_salt,
        kv_hints=request.kv_hints if knows_hints else None,
        session_id=(terms.session or None) if knows_session_id else None,
        stream=request.progress,
        deadline_s=terms.deadline_s,
        slo_ttft_ms=None if terms.slo_ttft_s is None else terms.slo_ttft_s * 1000,
        structured_outputs=_structured_outputs(request.constraint),
    )


def refetch_body(
    request: GenerationRequest, ticket: str, tokens: tuple[int, ...], *, knows_start: bool
) -> PrefillRequest:
    """Body of POST /v1/prefill for the KV of tokens that a request has had before: its prompt, and what was generated.
    The token that is sampled behind them is of no use; it must not end the request there, which would send no KV."""
    terms = msgspec.structs.replace(request.terms, deadline_s=None, slo_ttft_s=None)
    plain = GenerationRequest(
        rid=ticket,
        prompt=tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=2),
        ignore_eos=True,
        terms=terms,
        model=request.model,
    )
    return prefill_body(plain, ticket, knows_start=knows_start)


def with_prefill_response(
    request: GenerationRequest, result: GenerationResult, response: PrefillResponse | None
) -> GenerationResult:
    """Adds the prefill server's times and prompt logprobs to the result, and hidden states of the prompt before those
    of generated tokens. Raises HeadraceError (502) for hidden states that did not come, or not as they were asked
    for."""
    hidden = _hidden(request, result.hidden, response)
    if response is None:
        return result
    seconds = {name: value / 1000 for name, value in response.timing_ms.items()}
    timing = Timing(
        bootstrap_s=seconds.get("bootstrap", 0.0),
        queue_s=seconds.get("queue", 0.0),
        forward_s=seconds.get("forward", 0.0),
        transfer_s=seconds.get("transfer", 0.0),
        decode_s=result.timing.decode_s,
    )
    start, entries = request.sampling.prompt_logprobs_start, response.prompt_logprobs or ()
    logprobs = tuple(
        None if entry is None or position < start else entry.plain() for position, entry in enumerate(entries)
    )
    return msgspec.structs.replace(result, timing=timing, prompt_logprobs=logprobs, hidden=hidden)


def _hidden(
    request: GenerationRequest, generated: HiddenStates | None, response: PrefillResponse | None
) -> HiddenStates | None:
    """Hidden states of the prompt, and then those of tokens that were generated here."""
    if request.sampling.hidden_states is None:
        return None
    given = response.hidden_states if response is not None else None
    prompt = given.states() if given is not None else None
    length = len(request.prompt)
    start = length - 1 if request.sampling.hidden_states == "last" else 0
    if prompt is None or (prompt.start, prompt.count) != (start, length - start):
        message = "the prefill server has not sent the hidden states of the prompt"
        raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502))
    if generated is not None and (prompt.size, prompt.dtype) != (generated.size, generated.dtype):
        message = (
            f"the prefill server's hidden states are {prompt.size} elements of {prompt.dtype}, and those of generated "
            f"tokens {generated.size} of {generated.dtype}"
        )
        raise HeadraceError(ErrorInfo(code=PREFILL_FAILED, message=message, status=502))
    parts = [prompt] if generated is None else [prompt, generated]
    return joined(parts, length + (generated.count if generated is not None else 0))


def _structured_outputs(constraint: Constraint | None) -> dict[str, Any] | None:
    """The field that has the constraint."""
    if constraint is None:
        return None
    return {constraint.kind: json.loads(constraint.text) if constraint.kind == "choice" else constraint.text}
