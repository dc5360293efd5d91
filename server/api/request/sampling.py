"""Sampling fields of a body as SamplingParams, every value checked against its range."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.core.types.errors import HeadraceError, invalid
from headrace.core.types.request import SamplingParams
from headrace.server.api.request.schema import ChatBody, OpenAIBody, SamplingBody

MAX_LOGPROBS = 20  # alternatives per position that a metadata row can carry
MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 4096
MAX_SALT_CHARS = 256
MAX_OBJECTIVE_MS = 1e9
MAX_INT64 = (1 << 63) - 1


def sampling_params(body: SamplingBody, *, logprobs: int | None, max_tokens: int, vocab_size: int) -> SamplingParams:
    """Sampling parameters of a body. max_tokens: if the body gives none; the length of the prompt bounds it later.
    Raises HeadraceError (400) naming a field that is out of range, and the range."""
    limit = _within("max_tokens", body.max_tokens, max_tokens, 1, MAX_INT64)
    top_k = _within("top_k", body.top_k, 0, -1, MAX_INT64)
    seed = None if body.seed is None else int(_within("seed", body.seed, 0, -MAX_INT64 - 1, MAX_INT64)) & MAX_INT64
    return SamplingParams(
        temperature=_within("temperature", body.temperature, 1.0, 0.0, 2.0),
        top_k=min(max(0, int(top_k)), vocab_size),
        top_p=_top_p(body.top_p),
        min_p=_within("min_p", body.min_p, 0.0, 0.0, 1.0),
        seed=seed,
        max_tokens=int(limit),
        min_tokens=int(_within("min_tokens", body.min_tokens, 0, 0, limit)),
        stop_token_ids=_stop_ids(body.stop_token_ids or [], vocab_size),
        logprobs=_optional("logprobs", logprobs, MAX_LOGPROBS),
        prompt_logprobs=_optional("prompt_logprobs", body.prompt_logprobs, MAX_LOGPROBS),
    )


def stop_strings(body: SamplingBody) -> tuple[str, ...]:
    """Stop strings of a body. Raises HeadraceError (400) for too many, too long or empty ones."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid(f"stop[{index}]", f"stop strings have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    return tuple(dict.fromkeys(stops))


def request_fields(body: SamplingBody) -> dict[str, Any]:
    """Fields of a GenerationRequest beside its prompt and sampling. Raises HeadraceError (400)."""
    if body.deadline_s is not None and not body.deadline_s > 0:
        raise invalid("deadline_s", f"deadline_s is {body.deadline_s}; it has to be above 0 seconds")
    return {
        "stop": stop_strings(body),
        "ignore_eos": bool(body.ignore_eos),
        "priority": int(_within("priority", body.priority, 0, -(1 << 31), (1 << 31) - 1)),
        "slo_ttft_s": None if body.slo_ttft_ms is None else objective_s(body.slo_ttft_ms, "slo_ttft_ms"),
        "deadline_s": body.deadline_s,
        "replica": None if body.data_parallel_rank is None else replica_number(body.data_parallel_rank),
        "cache_salt": prefix_salt(body.cache_salt, body.extra_key),
    }


def replica_number(given: int) -> int:
    """A data-parallel rank; whether the server has it, the scheduler says. Raises HeadraceError (400) for a number that
    none can have."""
    if not 0 <= given < 1 << 31:
        raise invalid("data_parallel_rank", "data_parallel_rank is not among the ranks of this server, numbered from 0")
    return given


def objective_s(milliseconds: float, field: str) -> float:
    """The objective of a first token, in seconds. Raises HeadraceError (400) naming the field if it is not above 0."""
    if not 0 < milliseconds <= MAX_OBJECTIVE_MS:
        limit = f"it has to be above 0 and at most {MAX_OBJECTIVE_MS:g} milliseconds"
        raise invalid(field, f"{field} is {milliseconds:g}; {limit}")
    return milliseconds / 1000


def prefix_salt(cache_salt: str | None, extra_key: str | None) -> str:
    """The salt of the prefix cache for a request with these fields; another pair of them gives another salt. With an
    extra_key it is a digest of both, so that it is no longer than a client's salt may be. Raises HeadraceError (400)
    for a field that is too long."""
    for field, given in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if given is not None and len(given) > MAX_SALT_CHARS:
            raise invalid(field, f"{field} has {len(given)} characters; at most {MAX_SALT_CHARS} are allowed")
    salt = cache_salt or ""
    if not extra_key:
        return salt
    return hashlib.sha256(f"{len(salt)}:{salt}{extra_key}".encode()).hexdigest()


def choice_count(body: OpenAIBody) -> int:
    """Number of continuations of each prompt. Raises HeadraceError (400)."""
    return int(_within("n", body.n, 1, 1, MAX_CHOICES))


def chat_logprobs_wanted(body: ChatBody) -> int | None:
    """Number of alternatives per token, None for no logprobs. Raises HeadraceError (400) for top_logprobs without
    logprobs."""
    top = _optional("top_logprobs", body.top_logprobs, MAX_LOGPROBS)
    if not body.logprobs:
        if top:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        return None
    return top or 0


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


def _within(field: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise _out_of_range(field, value, low, high)
    return value


def _top_p(value: float | None) -> float:
    if value is not None and not 0 < value <= 1:
        raise invalid("top_p", f"top_p is {value}; it has to be above 0 and at most 1")
    return 1.0 if value is None else value


def _optional(field: str, value: int | None, high: int) -> int | None:
    return None if value is None else int(_within(field, value, 0, 0, high))


def _out_of_range(field: str, value: float, low: float, high: float) -> HeadraceError:
    if high == MAX_INT64 and low > -MAX_INT64:
        return invalid(field, f"{field} is {value}; it has to be at least {low:g}")
    return invalid(field, f"{field} is {value}; it has to be from {low:g} to {high:g}")


def _stop_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_IDS} are allowed")
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            message = f"stop_token_ids[{index}] is {token}, outside the vocabulary of {vocab_size}"
            raise invalid(f"stop_token_ids[{index}]", message)
    return tuple(dict.fromkeys(ids))
