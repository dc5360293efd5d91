"""Responses of a prefill server to routers: the first token of each choice, and where its KV is held."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from headrace.core.messages.replies import Tokens
from headrace.core.types.packed import pack, prompt_hash
from headrace.server.api.response.choices import Choice, Output, run_all
from headrace.server.frontend.generation.completions import Completions
from headrace.server.frontend.link.control_address import ControlAddress
from headrace.server.frontend.request.generation_request import (
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    discard_events,
)
from headrace.text.tokenizer import Tokenizer


async def prefill_choices(
    completions: Completions, tokenizer: Tokenizer, requests: Sequence[GenerationRequest]
) -> list[Output]:
    """Compute the prompts concurrently and send or hold their KV; each choice is its first token. Raises the
    HeadraceError of the first one that fails, after cancelling the others, held ones too."""
    with ExitStack() as on_failure:
        for request in requests:
            on_failure.callback(completions.cancel, request.rid, request.terms.tenant)
        done = await run_all(completions.prefill(request, discard_events) for request in requests)
        on_failure.pop_all()
    return [_output(tokenizer, *each) for each in done]


def _output(tokenizer: Tokenizer, first: Tokens, result: GenerationResult) -> Output:
    """The first token as a choice that was ended by its length."""
    choice = Choice()
    text = tokenizer.decode(first.tokens[:1])
    choice.add(GenerationDelta(text, first.tokens[:1], first.logprobs[:1], offsets=(0,)))
    return choice, msgspec.structs.replace(result, finish_reason=result.finish_reason or "length")


def transfer_params(
    control: ControlAddress,
    requested_host: str,
    prompts: Sequence[tuple[int, ...]],
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
) -> dict[str, Any]:
    """The kv_transfer_params with which a decode peer fetches held KV: NIXL's names where they mean the same, and ours.

    They serve every prompt of the request: tickets and prompt_hashes have one entry for each generation request;
    prompt_token_ids is one list, or a list of lists for several prompts. grammar is the key of the constraint that the
    first tokens keep to. requested_host: under which the client has reached this server.
    """
    info, stages = control.require_stages()
    constraint = requests[0].constraint
    tickets = [request.ticket for request in requests]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": info.instance,
        "remote_request_id": tickets[0],
        "remote_block_ids": [[0]],  # pages are named in the reservation; NIXL's clients require a list
        "remote_host": control.host(requested_host),
        "remote_port": info.control_port,
        "tp_size": 1,
        "remote_num_tokens": len(prompts[0]) if len(prompts) == 1 else [len(request.prompt) for request in requests],
        "ticket": tickets[0],
        "tickets": tickets,
        "prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts,
        "prompt_hashes": [prompt_hash(pack(request.prompt), request.terms.image_digest) for request in requests],
        "lease_s": min(result.lease_s or 0.0 for result in results),
        "protocol": 1,
        "fingerprint": stages.fingerprint,
        **({} if constraint is None else {"grammar": constraint.key}),
    }
