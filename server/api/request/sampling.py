"""Sampling fields of a body as SamplingParams. Their types have bounded them; what goes with others is checked here."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from headrace.core.types.errors import invalid, shown
from headrace.core.types.requests.request import SamplingParams
from headrace.server.api.request.schema import (
    ChatBody,
    CompletionBody,
    OpenAIBody,
    PrefillBody,
    ResponsesBody,
    SamplingBody,
    SamplingFields,
)
from headrace.server.http.ranges import MAX_INT64

MAX_ID_DIGITS = 18

COPIED = tuple(
    field
    for field in SamplingFields.__struct_fields__
    if field in SamplingParams.__struct_fields__ and field not in ("top_k", "top_p", "logit_bias", "stop_token_ids")
)
"""Fields that mean in a body what they mean in SamplingParams. Those that need more are in sampling_params()."""


class Ending(msgspec.Struct, frozen=True):
    """When the text of a request ends."""

    max_tokens: int | None = None
    """None for the default of the route."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


def ending(body: SamplingBody) -> Ending:
    """When the text ends, by what the body asks for and what it is needed for. Raises HeadraceError (400) for
    min_tokens where max_tokens is 0."""
    if isinstance(body, PrefillBody) and body.prompt_only:
        # No token ends the request, so that its KV is handed over whatever follows. A token is chosen with the prompt,
        # since metadata rows have one; the peer and the client have not asked for it.
        if body.min_tokens:
            raise invalid("min_tokens", f"min_tokens is {body.min_tokens}; it has to be 0 where max_tokens is 0")
        return Ending(max_tokens=2, ignore_eos=True)
    if isinstance(body, OpenAIBody) and body.kv_transfer_params and body.kv_transfer_params.do_remote_decode:
        # Routers that ask the prefill server first replace the client's stop conditions by their own (max_tokens 1,
        # min_tokens 1 or more). Only the decode server knows when the text ends: the first token must not end it here.
        return Ending(ignore_eos=True)
    return Ending(
        max_tokens=_max_tokens(body),
        min_tokens=body.min_tokens or 0,
        stop=stop_strings(body),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
    )


def sampling_params(body: SamplingBody, *, logprobs: int | None, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a body. max_tokens: if the body gives none; the length of the prompt bounds it later.
    Raises HeadraceError (400) for min_tokens above max_tokens, and for ids outside the vocabulary."""
    ends = ending(body)
    limit = max_tokens if ends.max_tokens is None else ends.max_tokens
    prompt_logprobs = _prompt_logprobs(body)
    return SamplingParams(
        **{field: value for field in COPIED if (value := getattr(body, field)) is not None},
        top_k=1 if body.top_p == 0 else min(max(0, body.top_k or 0), vocab_size),
        top_p=body.top_p or 1.0,
        seed=None if body.seed is None else body.seed & MAX_INT64,
        max_tokens=limit,
        min_tokens=_min_tokens(ends.min_tokens, limit),
        stop_token_ids=_stop_ids(ends.stop_token_ids, vocab_size),
        logit_bias=_biases(body.logit_bias or {}, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        prompt_logprobs_start=_logprobs_start(body, prompt_logprobs),
    )


def check_logprobs_start(sampling: SamplingParams, prompts: Iterable[Sequence[int]]) -> None:
    """Raises HeadraceError (400) if the logprobs are to start after the end of a prompt."""
    for prompt in prompts:
        if sampling.prompt_logprobs_start > len(prompt):
            given = f"prompt_logprobs_start is {sampling.prompt_logprobs_start}"
            raise invalid("prompt_logprobs_start", f"{given}; for this prompt it has to be from 0 to {len(prompt)}")


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """Stop strings of a body."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(dict.fromkeys(filter(None, given)))


def chat_logprobs_wanted(body: ChatBody) -> int | None:
    """Number of alternatives per token, None for no logprobs. Raises HeadraceError (400) for top_logprobs without
    logprobs."""
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    return body.top_logprobs or 0


def generated_choices(body: CompletionBody) -> int:
    """Continuations of each prompt to generate. Raises HeadraceError (400) for fewer than are to be returned, and for a
    stream of which not all are."""
    wanted = body.n or 1
    generated = wanted if body.best_of is None else body.best_of
    if generated < wanted:
        raise invalid("best_of", f"best_of is {generated}; it has to be at least n, which is {wanted}")
    if body.stream and generated > wanted:
        text = (
            f"best_of is {generated} and n is {wanted}: which of them are the best is known at the end; do not stream"
        )
        raise invalid("best_of", text, code="unsupported")
    return generated


def refuse_fields(given: Mapping[str, bool]) -> None:
    """Raises HeadraceError (400) for the first of these fields whose value is not served. Fields that are not served at
    all are in other_fields.py."""
    for field, is_given in given.items():
        if is_given:
            raise invalid(field, f"{field} is not supported; leave it out", code="unsupported")


def seeded(sampling: SamplingParams, choice: int) -> SamplingParams:
    """Sampling parameters of one of several choices: each has a seed of its own, derived from the given one."""
    if sampling.seed is None or choice == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & MAX_INT64)


def _min_tokens(given: int, limit: int) -> int:
    if given > limit:
        raise invalid("min_tokens", f"min_tokens is {given}; it has to be from 0 to {limit}")
    return given


def _biases(given: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        token = int(name) if name.isascii() and name.isdigit() and len(name) <= MAX_ID_DIGITS else -1
        if not 0 <= token < vocab_size:
            message = f"logit_bias has {shown(name)!r}, which is no token id from 0 to {vocab_size - 1}"
            raise invalid("logit_bias", message)
        biases[token] = bias
    return tuple(biases.items())


def _max_tokens(body: SamplingBody) -> int | None:
    """The limit by whichever of its names, and one token in the place of none that a completion asks for: it is
    computed with the prompt anyway, and is dropped."""
    if isinstance(body, CompletionBody) and body.prompt_only:
        return 1
    if isinstance(body, ChatBody | CompletionBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    if isinstance(body, ResponsesBody) and body.max_output_tokens is not None:
        return body.max_output_tokens
    return body.max_tokens


def _prompt_logprobs(body: SamplingBody) -> int | None:
    """Alternatives for each prompt token: echo needs those of the prompt where it has logprobs."""
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        return body.logprobs
    return body.prompt_logprobs


def _logprobs_start(body: SamplingBody, prompt_logprobs: int | None) -> int:
    if body.prompt_logprobs_start is not None and prompt_logprobs is None:
        raise invalid("prompt_logprobs_start", "prompt_logprobs_start needs prompt_logprobs")
    return body.prompt_logprobs_start or 0


def _stop_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            message = f"stop_token_ids[{index}] is {token}, outside the vocabulary of {vocab_size}"
            raise invalid(f"stop_token_ids[{index}]", message)
    return tuple(dict.fromkeys(ids))
