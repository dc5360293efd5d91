"""KV hints of a request: what its terms have of them, and what is answered."""

from collections.abc import Iterable, Sequence

import msgspec

from headrace.core.types.requests.kv_hints import (
    MAX_RETAIN_S,
    Demote,
    GivenHint,
    HintAnswer,
    HintResult,
    Keep,
    KvHintsEnvelope,
    Prefetch,
    Release,
    Retain,
    understood,
)
from headrace.core.types.requests.outcomes import HELD
from headrace.server.frontend.request.generation_request import GenerationRequest, GenerationResult

SHARED = "with --share-prefixes cached KV is nobody's own"
LEAVES = "it is demoted or released when the request ends"
UNDECIDED = "the KV is held for its peer; what is granted when that has it is not known yet"
NOT_KEPT = "the tenant's share of the pool (--retain-percent) is taken, or the prompt fills no page"
NOT_DEMOTED = "there is no tier to copy it to, others use it, or the prompt fills no page"
NOT_FOUND = "no cached KV of it was there to load or to fetch"
NOT_COME = "a sibling has more of it, which did not come"


def with_hints(
    request: GenerationRequest, envelope: KvHintsEnvelope | None, retention: str | None
) -> GenerationRequest:
    """The request with hints, and with OpenAI's prompt_cache_retention as one more."""
    hints = [understood(action) for action in (envelope.actions if envelope is not None else ())]
    if retention == "24h":
        hints.append(GivenHint("prompt_cache_retention", "retain", Keep(seconds=MAX_RETAIN_S, priority=-1)))
    if not hints:
        return request
    leaves = any(isinstance(hint.action, Demote | Release) for hint in hints)
    hints = [_of_a_request(hint, leaves) for hint in hints]
    keeps = [hint.action for hint in hints if isinstance(hint.action, Keep)]
    longest = max(keeps, key=lambda keep: (keep.seconds, keep.priority), default=None)
    terms = msgspec.structs.replace(
        request.terms,
        retain=None if longest is None else Retain(seconds=longest.seconds, priority=longest.priority),
        demote=any(isinstance(hint.action, Demote) for hint in hints),
        let_go=any(isinstance(hint.action, Release) for hint in hints),
    )
    return msgspec.structs.replace(request, terms=terms, kv_hints=envelope, hints=tuple(hints))


def without_grants(request: GenerationRequest) -> GenerationRequest:
    """The request on a server whose tenants share prefixes: no hint is granted, and
    nothing is retained by prediction."""
    terms = msgspec.structs.replace(request.terms, retain=None, demote=False, let_go=False, session="")
    return msgspec.structs.replace(request, terms=terms, hints=tuple(refused(request.hints, SHARED)))


def refused(hints: Iterable[GivenHint], problem: str) -> list[GivenHint]:
    """Hints of which none is granted."""
    return [msgspec.structs.replace(hint, action=None, problem=hint.problem or problem) for hint in hints]


def request_answers(request: GenerationRequest, result: GenerationResult) -> tuple[HintAnswer, ...]:
    """What was granted of a request's hints."""
    return tuple(answer(hint, _of_the_end(hint, result)) for hint in request.hints)


def answers(hints: Sequence[GivenHint], results: Sequence[HintResult], not_come: str = "") -> list[HintAnswer]:
    """What was granted of hints. results: of those with an action, in their order. not_come: what there is to say
    where a prefetch is granted nothing."""
    left, found = iter(results), list[HintAnswer]()
    for hint in hints:
        result = HintResult() if hint.action is None else next(left)
        if not_come and result.reason and isinstance(hint.action, Prefetch):
            result = msgspec.structs.replace(result, reason=f"{result.reason}; {not_come}")
        found.append(answer(hint, result))
    return found


def answer(hint: GivenHint, result: HintResult) -> HintAnswer:
    """What was granted of a hint."""
    reason = hint.problem or result.reason
    seconds = hint.action.seconds if isinstance(hint.action, Keep | Prefetch) and not reason else 0.0
    return HintAnswer(hint.action_id, hint.action_type, not reason, result.tokens, seconds, reason)


def _of_a_request(hint: GivenHint, leaves: bool) -> GivenHint:
    """A hint that comes with a request. leaves: so does one that takes the KV out of the pool."""
    match hint.action:
        case Prefetch():  # what it brings is the request's own, and Keep is for what comes after it
            return msgspec.structs.replace(hint, action=msgspec.structs.replace(hint.action, seconds=0.0))
        case Keep() if leaves:
            return refused([hint], LEAVES)[0]
    return hint


def _of_the_end(hint: GivenHint, result: GenerationResult) -> HintResult:
    """What was granted of a hint when its request had ended."""
    match hint.action:
        case Prefetch():
            tokens, reason = result.usage.cached_tokens, NOT_FOUND
        case Keep() | Demote() if result.kv == HELD:
            tokens, reason = 0, UNDECIDED
        case Keep():
            tokens, reason = result.retained, NOT_KEPT
        case Demote():
            tokens, reason = result.demoted, NOT_DEMOTED
        case _:
            return HintResult()
    return HintResult(tokens=tokens, reason="" if tokens else reason)
