"""Hidden states on their way to clients: how much memory they may take, and their parts as one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.core.types import refusals
from headrace.core.types.errors import ErrorInfo, HeadraceError, invalid
from headrace.core.types.requests.draft import HiddenStates
from headrace.server.frontend.request.generation_request import GenerationRequest

VALUE_BYTES = 4  # of one element, as limits count it, whatever the dtype
LEAST_TOTAL_BYTES = 128 << 20  # of all open requests together, or the most of one, if that is more


class HiddenLimits:
    """Bytes of hidden states that requests may ask for. Used by the event loop only."""

    def __init__(self, hidden_size: int, max_bytes: int) -> None:
        """hidden_size: elements of one state. max_bytes: of one HTTP request."""
        self._state_bytes = hidden_size * VALUE_BYTES
        self._max_bytes = max_bytes
        self._total_bytes = max(LEAST_TOTAL_BYTES, max_bytes)
        self._taken = 0

    def check(self, field: str, positions: int) -> None:
        """Raises HeadraceError (413) for an HTTP request that asks for more than one may. positions: tokens of all its
        prompts, and those that it may generate."""
        wanted = positions * self._state_bytes
        if wanted > self._max_bytes:
            message = (
                f"{field}: hidden states of up to {positions} tokens take {wanted} bytes, at {VALUE_BYTES} bytes a "
                f"value; --max-hidden-bytes allows {self._max_bytes} in one request"
            )
            raise invalid(field, message, code="too_many_hidden_states", status=413)

    def refusal(self, request: GenerationRequest, generated: int) -> ErrorInfo | None:
        """Why a prompt cannot be started now: others have asked for as much as there may be. generated: tokens that it
        may generate here."""
        wanted = self._bytes(request, generated)
        if not wanted or self._taken + wanted <= self._total_bytes:
            return None
        return refusals.HIDDEN_STATES.error(taken=self._taken, wanted=wanted, most=self._total_bytes)

    @contextmanager
    def taken(self, request: GenerationRequest, generated: int) -> Iterator[None]:
        """While a request is open, what it asks for is counted. generated: as for refusal()."""
        wanted = self._bytes(request, generated)
        self._taken += wanted
        try:
            yield
        finally:
            self._taken -= wanted

    def _bytes(self, request: GenerationRequest, generated: int) -> int:
        wanted = request.sampling.hidden_states
        if wanted is None:
            return 0
        return self._state_bytes * (1 if wanted == "last" else len(request.prompt) + generated)


def joined(parts: Sequence[HiddenStates], end: int) -> HiddenStates | None:
    """Hidden states that came in parts, in order, as one; those from position end on are left out. None for no parts.
    Raises HeadraceError (500) for parts that do not follow one another."""
    if not parts:
        return None
    first = parts[0]
    position = first.start
    for part in parts:
        if part.start != position or (part.size, part.dtype) != (first.size, first.dtype):
            message = f"hidden states from position {part.start} came after those up to {position}"
            raise HeadraceError(ErrorInfo(code="internal_error", message=message, status=500))
        position += part.count
    data = first.data if len(parts) == 1 else b"".join(part.data for part in parts)
    return HiddenStates(first.start, first.size, first.dtype, data[: max(0, end - first.start) * first.state_bytes])
