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
from headrace.server.frontend.request.generation_request import GenerationRequest

SHARED = "with --share-prefixes cached KV is nobody's own"
AT_START = "a request loads what it needs when it starts; send POST /v1/kv_hints before it"
AFTERWARDS = "send POST /v1/kv_hints when the request has ended"
NOT_KEPT = "the tenant's share of the pool (--retain-percent) is taken, or the prompt fills no page"


def with_hints(
    request: GenerationRequest, envelope: KvHintsEnvelope | None, retention: str | None
) -> GenerationRequest:
    """The request with hints, and with OpenAI's prompt_cache_retention as one more."""
    hints = [understood(action) for action in (envelope.actions if envelope is not None else ())]
    if retention == "24h":
        hints.append(GivenHint("prompt_cache_retention", "retain", Keep(seconds=MAX_RETAIN_S, priority=-1)))
    if not hints:
        return request
    hints = [_of_a_request(hint) for hint in hints]
    keeps = [hint.action for hint in hints if isinstance(hint.action, Keep)]
    longest = max(keeps, key=lambda keep: (keep.seconds, keep.priority), default=None)
    terms = msgspec.structs.replace(
        request.terms,
        retain=None if longest is None else Retain(seconds=longest.seconds, priority=longest.priority),
        let_go=any(isinstance(hint.action, Release) for hint in hints),
    )
    return msgspec.structs.replace(request, terms=terms, kv_hints=envelope, hints=tuple(hints))


def without_grants(request: GenerationRequest) -> GenerationRequest:
    """The request on a server whose tenants share prefixes: no hint is granted, and
    nothing is retained by prediction."""
    terms = msgspec.structs.replace(request.terms, retain=None, let_go=False, session="")
    return msgspec.structs.replace(request, terms=terms, hints=tuple(refused(request.hints, SHARED)))


def refused(hints: Iterable[GivenHint], problem: str) -> list[GivenHint]:
    """Hints of which none is granted."""
    return [msgspec.structs.replace(hint, action=None, problem=hint.problem or problem) for hint in hints]


def request_answers(request: GenerationRequest, retained: int) -> tuple[HintAnswer, ...]:
    """What was granted of a request's hints. retained: tokens whose KV is retained."""
    kept = HintResult(tokens=retained, reason="" if retained else NOT_KEPT)
    return tuple(answer(hint, kept if isinstance(hint.action, Keep) else HintResult()) for hint in request.hints)


def answers(hints: Sequence[GivenHint], results: Sequence[HintResult]) -> list[HintAnswer]:
    """What was granted of hints. results: of those with an action, in their order."""
    left = iter(results)
    return [answer(hint, HintResult() if hint.action is None else next(left)) for hint in hints]


def answer(hint: GivenHint, result: HintResult) -> HintAnswer:
    """What was granted of a hint."""
    reason = hint.problem or result.reason
    seconds = hint.action.seconds if isinstance(hint.action, Keep | Prefetch) and not reason else 0.0
    return HintAnswer(hint.action_id, hint.action_type, not reason, result.tokens, seconds, reason)


def _of_a_request(hint: GivenHint) -> GivenHint:
    """Prefetches and demotions do not come with a request."""
    match hint.action:
        case Prefetch():
            return refused([hint], AT_START)[0]
        case Demote():
            return refused([hint], AFTERWARDS)[0]
    return hint
