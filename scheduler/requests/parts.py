"""Parts of a request's record: what the queues note of it, what stages have of it, what its prompt has given."""

from dataclasses import dataclass, field

from headrace.core.types.requests.draft import Draft, DraftTerms, DraftTokens, HiddenStates
from headrace.core.types.requests.request import FirstToken
from headrace.scheduler.costs.backlog import UNRANKED, Rank
from headrace.scheduler.costs.cost_model import NOTHING, Load


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


@dataclass(slots=True, eq=False)
class OnStages:
    """What stages have of a request, so that they are told once, and asked to let go where there is something."""

    known: bool = False
    """They hold something under its serial, and need a ReleaseRequest."""

    grammar: bool = False
    """They have its constraint, under its serial."""

    history: bool = False
    """The stage that samples knows the tokens that its penalties go by, under its serial."""

    next_token: bool = False
    """The token at the next position to plan was or will be sampled by this pipeline, so they have it and are not sent
    it. False for a first token that came from a prefill server."""

    stopping: set[int] = field(default_factory=set)
    """Stages that have not answered CancelSend or CancelReceive."""

    def renumbered(self) -> None:
        """The request has another serial, under which no stage knows its constraint or its tokens."""
        self.grammar = self.history = False


@dataclass(slots=True, eq=False)
class PromptResult:
    """What computing a prompt whose KV is sent has given beside the KV."""

    first: FirstToken | None = None
    """What the metadata row says, once the first token is known."""

    plan: int = 0
    """Order number of the plan that gave the first token."""

    last_hidden: HiddenStates | None = None
    """Of the last prompt token, where a client or the peer has asked for it."""

    draft_tokens: DraftTokens | None = None
    """Of the first generated token, likewise."""

    def draft(self, wanted: DraftTerms) -> Draft | None:
        """What there is of the draft data that is wanted; None for nothing."""
        hidden = self.last_hidden if wanted.hidden else None
        tokens = None if self.draft_tokens is None else self.draft_tokens.best(wanted.top_k)
        return None if hidden is None and tokens is None else Draft(hidden, tokens)
