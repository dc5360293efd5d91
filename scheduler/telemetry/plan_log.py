"""Plans of the last seconds by rank, recorded while GET /status is asked for them."""

from collections import deque
from dataclasses import dataclass

from headrace.core.status import PlanSpan

WINDOW_S = 15.0
WATCHED_S = 10.0  # after the last look, in which recording goes on
SHORT_S = 0.06  # plans within so much time are one span
MAX_RANKS = 16
MAX_SPANS = 2 * round(WINDOW_S / SHORT_S)  # of a rank: two in a row take longer than SHORT_S


@dataclass(slots=True)
class _Span:
    begun: float
    ended: float
    busy_s: float
    plans: int
    tokens: int
    decode_rows: int


class PlanLog:
    """Bounded whatever the length of plans: short ones that follow one another are joined.

    A plan is recorded as ended when its report came, and begun as long before as it took its stage.
    """

    def __init__(self, now: float) -> None:
        self._spans: dict[int, deque[_Span]] = {}
        self._until = now + WATCHED_S

    def watched(self, now: float) -> bool:
        """Whether it was looked at recently."""
        return now < self._until

    def add(self, rank: int, duration_s: float, now: float, tokens: int = 0, decode_rows: int = 0) -> None:
        """A rank has computed a plan in so many seconds."""
        if rank not in self._spans and len(self._spans) >= MAX_RANKS:
            return
        spans = self._spans.setdefault(rank, deque(maxlen=MAX_SPANS))
        begun = now - duration_s
        last = spans[-1] if spans else None
        if last is not None:
            begun = max(begun, last.ended)
            if now - last.begun <= SHORT_S:
                last.busy_s += now - begun
                last.ended = now
                last.plans += 1
                last.tokens += tokens
                last.decode_rows += decode_rows
                return
        spans.append(_Span(begun, now, now - begun, 1, tokens, decode_rows))

    def look(self, now: float) -> dict[int, tuple[PlanSpan, ...]]:
        """The spans of each rank that ended within the window, oldest first. Recording goes on for WATCHED_S."""
        self._until = now + WATCHED_S
        for spans in self._spans.values():
            while spans and spans[0].ended < now - WINDOW_S:
                spans.popleft()
        return {rank: tuple(_shown(span, now) for span in spans) for rank, spans in self._spans.items()}


def _shown(span: _Span, now: float) -> PlanSpan:
    begun, ended = round(1000 * (now - span.begun)), round(1000 * (now - span.ended))
    return PlanSpan(begun, ended, round(1000 * span.busy_s), span.plans, span.tokens, span.decode_rows)
