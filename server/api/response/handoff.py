"""A prefill server's answers to routers: every job computed, handed over or held, and shown with its first token."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from headrace.core.messages.frontend import Tokens
from headrace.core.types.addresses import is_wildcard
from headrace.core.types.packed import pack, prompt_hash
from headrace.server.api.request.schema import SamplingBody
from headrace.server.api.response.choices import Choice
from headrace.server.frontend.generation import Delta, GenerationResult, Job, ignore
from headrace.server.frontend.service import Service
from headrace.server.upstream.handoff_params import HandoffParams


async def hand_over(service: Service, jobs: Sequence[Job]) -> list[tuple[Choice, GenerationResult]]:
    """Run the jobs beside each other. The first one that fails takes the others back, held ones too, and its
    HeadraceError is raised."""
    try:
        with ExitStack() as unless_all_succeed:
            for job in jobs:
                unless_all_succeed.callback(service.cancel, job.rid)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(service.prefill(job, ignore)) for job in jobs]
            unless_all_succeed.pop_all()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [_shown(service, *task.result()) for task in tasks]


def _shown(service: Service, first: Tokens, result: GenerationResult) -> tuple[Choice, GenerationResult]:
    """The first token as a choice that its length ended."""
    choice = Choice()
    text = service.tokens.tokenizer.decode(first.tokens[:1])
    choice.take(Delta(text, first.tokens[:1], first.logprobs[:1]))
    return choice, msgspec.structs.replace(result, finish_reason=result.finish_reason or "length")


def lift_limits(body: SamplingBody, names: HandoffParams) -> None:
    """Routers that ask the prefill server first put limits of their own in the place of the client's (max_tokens 1,
    min_tokens 1 or more). Only the decode server knows when the text ends, so the first token must not end it here."""
    if names.kv_transfer_params is not None and names.kv_transfer_params.do_remote_decode:
        body.max_tokens = body.min_tokens = body.stop = body.stop_token_ids = None
        body.ignore_eos = True


def reachable_host(control_host: str, asked: str) -> str:
    """Where peers find a control endpoint that is bound to control_host. asked: the host under which a client has
    reached us, which is the answer where that is all addresses."""
    return asked if is_wildcard(control_host) else control_host


def held_params(
    service: Service,
    host: str,
    prompts: Sequence[tuple[int, ...]],
    jobs: Sequence[Job],
    found: Sequence[tuple[Choice, GenerationResult]],
) -> dict[str, Any]:
    """What an answer says beside its choices where KV is held: its kv_transfer_params. Otherwise nothing."""
    if not jobs[0].hold:
        return {}
    return {"kv_transfer_params": transfer_params(service, host, prompts, jobs, [result for _, result in found])}


def transfer_params(
    service: Service,
    host: str,
    prompts: Sequence[tuple[int, ...]],
    jobs: Sequence[Job],
    results: Sequence[GenerationResult],
) -> dict[str, Any]:
    """The kv_transfer_params with which a decode peer finds held KV: under NIXL's names where they mean the same, and
    our own. They serve every prompt of the request: tickets and prompt_hashes have one entry for each job, prompt by
    prompt; prompt_token_ids is one list, or a list of lists where there are several prompts. host: where the client
    has reached this server, for a control endpoint that listens on all addresses.
    """
    engine = service.engine
    assert engine is not None, "nothing is computed without an engine"
    tickets = [job.ticket for job in jobs]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine.instance,
        "remote_request_id": tickets[0],
        "remote_block_ids": [[0]],  # there are no block ids to know; NIXL's readers want some
        "remote_host": reachable_host(service.config.transfer.host, host),
        "remote_port": engine.control_port,
        "tp_size": 1,
        "remote_num_tokens": len(prompts[0]) if len(prompts) == 1 else [len(job.prompt) for job in jobs],
        "ticket": tickets[0],
        "tickets": tickets,
        "prompt_token_ids": prompts[0] if len(prompts) == 1 else prompts,
        "prompt_hashes": [prompt_hash(pack(job.prompt)) for job in jobs],
        "lease_s": min(result.lease_s or 0.0 for result in results),
        "protocol": 1,
        "fingerprint": engine.fingerprint,
    }
