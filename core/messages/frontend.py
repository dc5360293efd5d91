"""Messages between the front end and the scheduler (ZMQ, msgpack)."""

import msgspec

from headrace.core.stats import Stats
from headrace.core.trace import SchedulerTrace
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.request import (
    AnyRoute,
    DecodeHere,
    HandoffStats,
    SamplingParams,
    Timing,
    TokenLogprob,
    Usage,
)


class FrontendRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what the front end sends."""


class Submit(FrontendRequest, frozen=True, kw_only=True):
    """One prompt to compute or fetch, and to decode, hand over or drop."""

    rid: str
    """Unique id of the request."""

    prompt: bytes
    """Packed int32 token ids."""

    sampling: SamplingParams
    route: AnyRoute = DecodeHere()
    """Where the KV comes from and where it goes."""

    priority: int = 0
    deadline_s: float | None = None
    """Seconds that the client waits in all; None: no limit."""

    cache_salt: str = ""
    """Prompts share cached pages only with prompts of the same salt."""

    progress: bool = False
    """Send Progress messages."""


class Abort(FrontendRequest, frozen=True, kw_only=True):
    """Take a request back. Answered by RequestFailed with this error unless the request has already ended.
    finish: the request is complete for its owner (a stop string was seen); answered by RequestFinished."""

    rid: str
    error: ErrorInfo | None = None
    finish: bool = False


class RefuseTicket(FrontendRequest, frozen=True, kw_only=True):
    """A prompt was refused before it was submitted: the peer that has come for its ticket, or will, is to be told."""

    ticket: str
    error: ErrorInfo


class ReleaseTicket(FrontendRequest, frozen=True, kw_only=True):
    """A request for a ticket that somebody else has posted was refused before it was submitted: the prefill server is
    to hear that nobody will come."""

    prefill: str
    ticket: str
    reason: str


class AddPrefill(FrontendRequest, frozen=True, kw_only=True):
    """Dial a prefill server's control endpoint. name: its URL as configured; endpoint: tcp://host:port; server_key:
    its CURVE public key, "" to connect in the clear."""

    name: str
    endpoint: str
    server_key: str = ""


class RemovePrefill(FrontendRequest, frozen=True, kw_only=True):
    """Hang up on a prefill server."""

    name: str


class Drain(FrontendRequest, frozen=True, kw_only=True):
    """Refuse new work; answered by Drained when the last request has ended."""


class QueryStats(FrontendRequest, frozen=True, kw_only=True):
    """Ask for a Stats snapshot; doubles as the liveness probe of the scheduler's loop."""

    token: int


class StartTrace(FrontendRequest, frozen=True, kw_only=True):
    """Have the scheduler and its stages record what they do. A recording that is under way is dropped."""

    trace: int


class EndTrace(FrontendRequest, frozen=True, kw_only=True):
    """End the recording; answered by Traced, and by StageTraced from each of the stages that Traced counts."""

    trace: int


class StageLost(FrontendRequest, frozen=True, kw_only=True):
    """The supervisor saw a stage process end."""

    stage: int
    message: str


class Shutdown(FrontendRequest, frozen=True, kw_only=True):
    """End the scheduler and its stages now; unfinished requests fail, peers are told."""


class SchedulerReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of what the scheduler sends."""


class EngineState(SchedulerReply, frozen=True, kw_only=True):
    """Whether the stages would serve a request. Sent on every change."""

    ready: bool
    """Every stage has loaded and warmed up, and no drain was requested."""
    reason: str = ""
    """Why not, in words; "" while it is not known."""


class StagePools(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages reported once all of them were ready."""

    fingerprint: str
    """Of the model (see headrace.engine.model.fingerprint); the same on every stage."""
    kv_pages: int
    """Pages of the smallest KV pool."""
    data_endpoints: tuple[str, ...]
    """tcp://HOST:PORT of the data socket of each stage, in stage order."""


class ServerInfo(SchedulerReply, frozen=True, kw_only=True):
    """Identity and addresses of this server. Sent when the scheduler process starts, and whenever a group of stages has
    become ready, before the EngineState that says so."""

    instance: str
    """Random id of this run of the server, 32 hexadecimal digits."""
    control_port: int
    """TCP port of the control endpoint; 0 in roles without one."""
    stages: StagePools | None = None
    """None until all stages were ready for the first time."""


class StageDown(SchedulerReply, frozen=True, kw_only=True):
    """A stage has failed or fell silent: its group, whose start was the epoch-th, is of no use any more.
    served: the group had computed something by then."""

    stage: int
    message: str
    epoch: int
    served: bool = False


class PrefillState(SchedulerReply, frozen=True, kw_only=True):
    """A prefill server's control endpoint was reached, refused us, or fell silent."""

    name: str
    up: bool
    reason: str = ""


class Reserved(SchedulerReply, frozen=True, kw_only=True):
    """Route FetchFrom: pages are leased here and reserved at the prefill server; post the prompt now."""

    rid: str


class Progress(SchedulerReply, frozen=True, kw_only=True):
    """phase: bootstrapped, computing, transferring. done of total prompt tokens are computed."""

    rid: str
    phase: str
    done: int
    total: int


class Tokens(SchedulerReply, frozen=True, kw_only=True):
    """New tokens of a request, in order; logprobs has one entry per token where asked for."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Held(SchedulerReply, frozen=True, kw_only=True):
    """The prompt of a request with hold set is computed; RequestFinished or RequestFailed follows when its KV is
    fetched or let go. lease_s: how long a peer has to come for it or renew it; 0 when one has come already."""

    rid: str
    lease_s: float
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class RequestFinished(SchedulerReply, frozen=True, kw_only=True):
    """The end of a request that went well; all its tokens were sent in Tokens before."""

    rid: str
    reason: str
    usage: Usage
    timing: Timing
    handoff: HandoffStats = HandoffStats()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()


class RequestFailed(SchedulerReply, frozen=True, kw_only=True):
    """The end of a request that did not go well."""

    rid: str
    error: ErrorInfo


class Drained(SchedulerReply, frozen=True, kw_only=True):
    """No request is left."""


class StatsReply(SchedulerReply, frozen=True, kw_only=True):
    """Answer to QueryStats with the same token."""

    token: int
    stats: Stats


class Traced(SchedulerReply, frozen=True, kw_only=True):
    """The scheduler's part of a recording."""

    trace: int
    scheduler: SchedulerTrace


class StageTraced(SchedulerReply, frozen=True, kw_only=True):
    """A stage's part of a recording. spans: an encoded headrace.core.trace.StageTrace."""

    trace: int
    stage: int
    spans: bytes


AnyFrontendRequest = (
    Submit
    | Abort
    | RefuseTicket
    | ReleaseTicket
    | AddPrefill
    | RemovePrefill
    | Drain
    | QueryStats
    | StartTrace
    | EndTrace
    | StageLost
    | Shutdown
)
AnySchedulerReply = (
    EngineState
    | ServerInfo
    | StageDown
    | PrefillState
    | Reserved
    | Progress
    | Tokens
    | Held
    | RequestFinished
    | RequestFailed
    | Drained
    | StatsReply
    | Traced
    | StageTraced
)
