"""Parts of a request's record: what the queues note of it, what stages have of it, what its prompt has given, and the
spans of one that is part of a distributed trace.
"""

from dataclasses import dataclass, field
from enum import Enum

from headrace.core.trace import RequestSpan
from headrace.core.types.requests.draft import Draft, DraftTerms, DraftTokens, HiddenStates
from headrace.core.types.requests.request import FirstToken
from headrace.scheduler.costs.backlog import UNRANKED, Rank
from headrace.scheduler.costs.cost_model import NOTHING, Load

MAX_CHUNKS = 128
MAX_PHASES = 64  # a request has more than five only if it is preempted again and again


@dataclass(slots=True, eq=False)
class QueueEntry:
    """What the queues note of a request."""

    expected_cached: int = 0
    """Positions that the prefix cache had when it was last looked up for a request that has no pages yet."""

    cache_version: int = -1
    """Version of the prefix tree that expected_cached is from; -1: it was not looked up."""

    load: Load = NOTHING
    """What they count of it as to be computed."""

    rank: Rank = UNRANKED
    """The rank under which they count it."""


class Leftover(Enum):
    """What becomes of the pages of a failed fetch (lifecycle/leftovers.py)."""

    SETTLING = "settling"  # they may still be written into
    KEPT = "kept"  # the leading ones are in the prefix cache, for another attempt


@dataclass(slots=True, eq=False)
class OnStages:
    """What stages have of a request, so that they are told once, and asked to release it where there is something."""

    known: bool = False
    """They hold something under its serial, and need a ReleaseRequest."""

    grammar: bool = False
    """They have its constraint, under its serial."""

    images: bool = False
    """They have its images, under its serial."""

    history: bool = False
    """The stage that samples knows the tokens that its penalties go by, under its serial."""

    next_token: bool = False
    """The token at the next position to plan was or will be sampled by this pipeline, so they have it and are not sent
    it. False for a first token that came from a prefill server."""

    stopping: set[int] = field(default_factory=set)
    """Stages that have not answered CancelSend or CancelReceive."""

    def renumbered(self) -> None:
        """The request has another serial, under which no stage knows its constraint, its images or its tokens."""
        self.grammar = self.images = self.history = False


@dataclass(slots=True, eq=False)
class PromptResult:
    """What computing a prompt whose KV is sent has given beside the KV."""

    first: FirstToken | None = None
    """What the metadata row says, once the first token is known."""

    plan: int = 0
    """Order number of the plan that gave the first token."""

    last_hidden: HiddenStates | None = None
    """Hidden states of the last prompt token, where a client or the peer has asked for it."""

    draft_tokens: DraftTokens | None = None
    """Draft tokens beside the first generated token, likewise."""

    def draft(self, wanted: DraftTerms) -> Draft | None:
        """What there is of the draft data that is wanted; None for nothing."""
        hidden = self.last_hidden if wanted.hidden else None
        tokens = None if self.draft_tokens is None else self.draft_tokens.best(wanted.top_k)
        return None if hidden is None and tokens is None else Draft(hidden, tokens)


@dataclass(slots=True, eq=False)
class SpanLog:
    """The spans of a request that is traced: its phases, and the chunks of its prefill. Bounded: what comes after so
    many of either is counted only."""

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


@dataclass(slots=True, eq=False)
class TtftPromise:
    """The bound that was promised to one request."""

    bound_s: float
    """Seconds from its admission to its first token, without those that it waits for a peer."""

    predicted_s: float
    """The same before the factor by which promises are kept."""

    length: int
    """Index of the length whose factor it has (scheduler/promises/promises.py)."""

    ttft_s: float | None = None
    """What it was; None while it is not known."""

    broken: bool = False
