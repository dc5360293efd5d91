"""A call followed to its end: its tokens become text, and what the scheduler says beside them the result."""

from collections.abc import Callable

import msgspec

from headrace.core.messages.replies import (
    HiddenPart,
    LogprobPart,
    PrefillDecided,
    Progress,
    Promised,
    RequestFinished,
    Reserved,
    Tokens,
)
from headrace.core.types.errors import GRAMMAR_REJECTED, ErrorInfo, HeadraceError
from headrace.server.frontend.generation.results import PromptParts, delta_of, finish_reason, result_of, stop_reason
from headrace.server.frontend.link.call import Call
from headrace.server.frontend.request.generation_request import (
    Emit,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
)
from headrace.server.frontend.served_model import ServedModel
from headrace.text.detokenizer import TextStream


class FirstTokenForbidden(Exception):
    """The prefill server, which did not know the client's min_tokens, sampled a first token that ends the text."""


def end_tokens(model: ServedModel, request: GenerationRequest) -> tuple[int, ...]:
    """Token ids of the model that end the text of a request."""
    return () if request.ignore_eos else model.tokenizer.eos_ids


def note_promise(request: GenerationRequest, event: Promised) -> None:
    """Tell who observes a request by when its first token is to come."""
    if request.observer is not None:
        request.observer.promised(event.bound_s)


class CallFollower:
    """Emits the progress and the text of a call until that ends."""

    def __init__(
        self,
        model: ServedModel,
        call: Call,
        request: GenerationRequest,
        emit: Emit,
        *,
        on_reserved: Callable[[Reserved, list[int]], None] = lambda _reserved, _generated: None,
        on_kept: Callable[[], None] = lambda: None,
        forbidden: frozenset[int] = frozenset(),
    ) -> None:
        """on_reserved: called when pages are reserved here, with the tokens so far. on_kept: called when the prompt
        goes to no prefill server. forbidden: token ids that the first token must not be."""
        self._model = model
        self._call = call
        self._request = request
        self._emit = emit
        self._on_reserved = on_reserved
        self._on_kept = on_kept
        self._forbidden = forbidden
        ends = frozenset((*request.sampling.stop_token_ids, *end_tokens(model, request)))
        self._hidden_ends = frozenset() if request.keep_stop else ends
        self._text = TextStream(
            model.tokenizer.showing(request.shown),
            request.prompt,
            request.stop,
            ends,
            request.sampling.min_tokens,
            keep=request.keep_stop,
        )
        self._stopped, self._seen = False, 0
        self._parts = PromptParts(len(request.prompt))
        self.generated: list[int] = []
        """Tokens so far."""

    async def run(self) -> GenerationResult:
        """Follow the call. Raises HeadraceError if it fails, or its first token does not keep to the constraint, and
        FirstTokenForbidden."""
        while True:
            event = await self._call.next()
            match event:
                case PrefillDecided():
                    if not event.decision.remote:
                        self._on_kept()
                case Reserved():
                    self._on_reserved(event, self.generated)
                case Promised():
                    note_promise(self._request, event)
                case Progress():
                    await self._emit(event)
                case HiddenPart() | LogprobPart():
                    self._parts.add(event)
                case Tokens():
                    self.generated += event.tokens
                    if not self._stopped:
                        await self._show(event)
                case RequestFinished():
                    return await self._end(event)

    async def _show(self, event: Tokens) -> None:
        if not self._seen:
            await self._check_first(event.tokens[:1])
        text = self._text
        await self._emit(delta_of(text, self._hidden_ends, event))
        self._stopped = text.stopped
        if self._stopped and not self._call.ends_with(event.tokens[: text.tokens - self._seen]):
            self._call.finish()
        self._seen = text.tokens

    async def _check_first(self, first: tuple[int, ...]) -> None:
        """The first token of a prefill server that has not masked it is refused (502). The request has ended here
        then, and may move to another prefill server."""
        if not self._forbidden.isdisjoint(first):
            raise FirstTokenForbidden
        request = self._request
        if not self._call.fetches or request.constraint is None or not first:
            return
        if problem := await self._model.grammars.problem(request.constraint, first[0], client=request.terms.tenant):
            message = f"the prefill server has not kept to the constraint of this request: {problem}"
            error = ErrorInfo(code=GRAMMAR_REJECTED, message=message, status=502)
            await self._call.end(error)
            raise HeadraceError(msgspec.structs.replace(error, at_prefill=True))

    async def _end(self, event: RequestFinished) -> GenerationResult:
        text, request = self._text, self._request
        if not self._stopped and (rest := text.flush()):
            await self._emit(GenerationDelta(rest))
        reason = "stop" if self._stopped else finish_reason(event.reason) or "stop"
        states = self._parts.hidden(len(request.prompt) + max(0, text.tokens - 1))
        result = result_of(event, reason, text.tokens, states, self._parts.logprobs)
        return msgspec.structs.replace(result, stop_reason=stop_reason(text, request.sampling))
