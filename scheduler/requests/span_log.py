"""The spans of a request that is part of a distributed trace: its phases, and the chunks of its prefill."""

from dataclasses import dataclass, field

from headrace.core.trace import RequestSpan

MAX_CHUNKS = 128
MAX_PHASES = 64  # a request has more than five only if it is preempted again and again


@dataclass(slots=True, eq=False)
class SpanLog:
    """Bounded: what comes after so many chunks, or phases, is counted only."""

    spans: list[RequestSpan] = field(default_factory=list)
    chunks: int = 0
    phases: int = 0

    @property
    def dropped(self) -> int:
        """Spans that were not kept."""
        return self.chunks + self.phases - len(self.spans)

    def phase(self, phase: str, start: float, end: float) -> None:
        """The request has left a phase."""
        self.phases += 1
        if self.phases <= MAX_PHASES:
            self.spans.append(RequestSpan(phase, start, end))

    def chunk(self, first: int, count: int, start: float, end: float) -> None:
        """The positions [first, first + count) were computed."""
        self.chunks += 1
        if self.chunks <= MAX_CHUNKS:
            self.spans.append(RequestSpan("", start, end, first, count))
