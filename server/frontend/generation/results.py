"""What a client gets of the scheduler's events: new text, hidden states and logprobs of the prompt, and how the request
ended."""

import msgspec

from headrace.core.messages.replies import Held, HiddenPart, LogprobPart, RequestFinished, Tokens
from headrace.core.types.requests.draft import HiddenStates
from headrace.core.types.requests.outcomes import HELD
from headrace.core.types.requests.prompt_logprobs import PackedLogprobs
from headrace.core.types.requests.request import FinishReason, SamplingParams
from headrace.server.frontend.request.generation_request import GenerationDelta, GenerationResult
from headrace.server.frontend.request.hidden_states import joined
from headrace.text.detokenizer import TextStream


def stop_reason(text: TextStream, sampling: SamplingParams) -> int | str | None:
    """What ended the text, if the client has named it."""
    ended_by = text.ended_by
    return ended_by if isinstance(ended_by, str) or ended_by in sampling.stop_token_ids else None


def delta_of(text: TextStream, hidden_ends: frozenset[int], event: Tokens) -> GenerationDelta:
    """The text of new tokens, up to the one that ends it. hidden_ends: those of which nothing is told."""
    pieces: list[str] = []
    offsets: list[int] = []
    shown = ended = 0
    for token in event.tokens:
        offsets.append(text.chars)
        pieces.append(text.push(token))
        ended = text.stopped and token in hidden_ends
        shown += not ended
        if text.stopped:
            break
    logprobs = event.logprobs
    ends = slice(shown, shown + ended)
    return GenerationDelta(
        "".join(pieces),
        event.tokens[:shown],
        logprobs[:shown],
        end_logprobs=logprobs[ends],
        offsets=tuple(offsets[:shown]),
        end_offsets=tuple(offsets[ends]),
        end_tokens=event.tokens[ends],
    )


def finish_reason(reason: str) -> FinishReason | None:
    """Why the text ended, as APIs name it; None for a prompt that does not go on here."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None


def result_of(
    event: RequestFinished,
    reason: FinishReason | None,
    completion_tokens: int,
    hidden: HiddenStates | None,
    logprobs: PackedLogprobs,
) -> GenerationResult:
    """How a request ended. reason: None if its prompt does not go on here."""
    return GenerationResult(
        finish_reason=reason,
        kv="" if reason else event.reason,
        usage=msgspec.structs.replace(event.usage, completion_tokens=completion_tokens),
        timing=event.timing,
        handoff=event.handoff,
        peer=event.peer,
        promise=event.promise,
        prompt_logprobs=logprobs,
        hidden=hidden,
        retained=event.retained,
        demoted=event.demoted,
    )


def held_result(event: Held, hidden: HiddenStates | None, logprobs: PackedLogprobs) -> GenerationResult:
    """How a request ended whose KV is held for a peer."""
    return GenerationResult(
        finish_reason=None,
        kv=HELD,
        usage=event.usage,
        timing=event.timing,
        promise=event.promise,
        prompt_logprobs=logprobs,
        hidden=hidden,
        lease_s=event.lease_s,
    )


class PromptParts:
    """Hidden states and prompt logprobs of one request, which the scheduler reports in parts."""

    def __init__(self, prompt_tokens: int) -> None:
        self._states: list[HiddenStates] = []
        self.logprobs = PackedLogprobs(prompt_tokens)
        """Empty where none were asked for."""

    def add(self, part: HiddenPart | LogprobPart) -> None:
        """Take in the next part."""
        if isinstance(part, HiddenPart):
            self._states.append(part.states)
        else:
            self.logprobs.add(part.run)

    def hidden(self, end: int) -> HiddenStates | None:
        """Hidden states of the positions before end; None for none. Raises HeadraceError (500) as joined() does."""
        return joined(self._states, end)
