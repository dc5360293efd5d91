"""Messages of the scheduler to the front end (msgpack)."""

import msgspec

from headrace.core.stats import Stats
from headrace.core.status import SchedulerStatus
from headrace.core.trace import RequestSpan, SchedulerTrace
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.forecast import ForecastReport
from headrace.core.types.kv.geometry import CacheShape, Component
from headrace.core.types.kv.kv_files import KvComputation
from headrace.core.types.ranks.expert_load import ExpertLoad
from headrace.core.types.requests.draft import DraftTokens, HiddenStates
from headrace.core.types.requests.kv_hints import HintResult
from headrace.core.types.requests.kv_return import PoolForecast
from headrace.core.types.requests.prompt_logprobs import LogprobRun
from headrace.core.types.requests.remote_prefill import PrefillDecision
from headrace.core.types.requests.request import HandoffStats, Promise, Timing, TokenLogprob, Usage


class SchedulerReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the scheduler's messages to the front end."""


class EngineState(SchedulerReply, frozen=True, kw_only=True):
    """Whether the stages would serve a request. Sent on every change."""

    ready: bool
    """Every stage has loaded and warmed up, and no drain was requested."""
    reason: str = ""
    """Why not, in words; "" while it is not known."""


class StagePools(msgspec.Struct, frozen=True, kw_only=True):
    """What the stages reported once all of them were ready."""

    fingerprint: str
    """Fingerprint of the model (see headrace.engine.model.fingerprint); the same on every stage."""
    adapters: dict[str, str] = {}
    """Fingerprints of the LoRA adapters of --lora by name; the same on every stage."""
    kv_pages: int
    """Pages of the smallest KV pool."""
    data_endpoints: tuple[str, ...]
    """tcp://HOST:PORT of the data socket of each rank that offers KV, in rank order."""
    data_ranks: tuple[int, ...] = ()
    """Their ranks."""
    same_bits: bool | None = None
    """Whether trials of all stages gave the same bits, see StageReady; None where one made none."""
    cache: CacheShape | None = None
    """Keys and values of the whole model; None for one with other components."""
    tensors: tuple[Component, ...] = ()
    """What pages hold of the whole model, over all its ranks."""
    computations: tuple[KvComputation, ...] = ()
    """What the bits of its ranks depend on beside the model, each once."""
    reproducible: bool = False
    """They depend on nothing else, at any rank."""


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
    """A stage has failed or fell silent: its group has to be started again."""

    stage: int
    message: str
    epoch: int
    """Number of the group's start."""

    served: bool = False
    """The group has computed a plan, or has failed because of another server: such restarts are not counted."""


class PrefillState(SchedulerReply, frozen=True, kw_only=True):
    """A prefill server's control endpoint was reached, refused us, or fell silent."""

    name: str
    up: bool
    reason: str = ""
    unfit: bool = False
    """The two servers do not fit each other, so that waiting for it does not help."""


class PrefillDecided(SchedulerReply, frozen=True, kw_only=True):
    """Route FetchFrom with compare: where the prompt is computed. Sent once, at admission."""

    rid: str
    decision: PrefillDecision


class Reserved(SchedulerReply, frozen=True, kw_only=True):
    """Route FetchFrom: pages are leased here and reserved at the prefill server; post the prompt now."""

    rid: str
    ticket: str = ""
    """Of a request that was preempted, and whose KV is fetched again: the ticket that it is fetched under. "": that of
    the request's route."""

    tokens: int = 0
    """Tokens of the prompt and of what was reported since, from the first one on, whose KV is fetched again."""

    cached: int = 0
    """Leading tokens whose KV is here already, and not fetched."""


class Progress(SchedulerReply, frozen=True, kw_only=True):
    """Progress of a request that asked for it."""

    rid: str
    phase: str
    """bootstrapped, computing or transferring"""

    done: int
    """Prompt tokens that are computed."""

    total: int
    """Prompt tokens."""

    ttft_bound_s: float | None = None
    """Seconds from its admission to its first token that were promised; None: none were."""


class Promised(SchedulerReply, frozen=True, kw_only=True):
    """The time to first token of a request is promised. Sent once, at its admission."""

    rid: str
    bound_s: float
    """Seconds from its admission, without those that it waits for a peer."""


class Tokens(SchedulerReply, frozen=True, kw_only=True):
    """New tokens of a request, in order."""

    rid: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per token, where asked for."""

    draft: DraftTokens | None = None
    """Draft tokens beside the first token, where asked for."""


class HiddenPart(SchedulerReply, frozen=True, kw_only=True):
    """Hidden states of a request that asked for them, in the order of their positions. Those of the prompt come before
    its end is reported, or that it is held."""

    rid: str
    states: HiddenStates


class LogprobPart(SchedulerReply, frozen=True, kw_only=True):
    """Logprobs of prompt tokens of a request that asked for them, as they are computed. All of them come before its end
    is reported, or that it is held."""

    rid: str
    run: LogprobRun


class KvDigested(SchedulerReply, frozen=True, kw_only=True):
    """The digest of a request's KV at positions [start, end), where its Submit has asked for one. It may not come,
    and may come behind the request's end."""

    rid: str
    start: int
    end: int
    digest: dict[str, tuple[str, ...]]
    """See KvDigest."""


class Held(SchedulerReply, frozen=True, kw_only=True):
    """The prompt of a held request (SendTo.hold) is computed. RequestFinished or RequestFailed follows when its KV is
    fetched or released."""

    rid: str
    lease_s: float
    """Seconds that a peer has to reserve the ticket or renew the lease; 0 when one has reserved already."""

    usage: Usage
    timing: Timing
    promise: Promise | None = None
    """None: nothing was promised."""


class RequestFinished(SchedulerReply, frozen=True, kw_only=True):
    """A request has ended well; all its tokens were sent in Tokens before."""

    rid: str
    reason: str
    usage: Usage
    timing: Timing
    handoff: HandoffStats = HandoffStats()
    peer: str = ""
    """Name of the decode server that the KV went to."""

    retained: int = 0
    """Tokens whose KV is retained for as long as its terms asked for."""

    promise: Promise | None = None
    """None: nothing was promised, or it has ended without a first token."""

    demoted: int = 0
    """Tokens whose KV goes to a tier, as its terms asked for, when its pages are free: those that it alone uses."""


class RequestFailed(SchedulerReply, frozen=True, kw_only=True):
    """A request has failed."""

    rid: str
    error: ErrorInfo


class KvHinted(SchedulerReply, frozen=True, kw_only=True):
    """Answer to KvHint with the same token."""

    token: int
    results: tuple[HintResult, ...]
    """One for each action."""


class RequestTraced(SchedulerReply, frozen=True, kw_only=True):
    """The spans of a request that was submitted with a traceparent. Sent at its end, before that is reported."""

    rid: str
    traceparent: str
    spans: tuple[RequestSpan, ...]
    """The request's spans, in order of their ends."""

    dropped: int = 0
    """Spans beyond the limit for one request."""

    usage: Usage
    handoff: HandoffStats = HandoffStats()
    peer: str = ""
    """Name of the server at the other end of its transfer."""

    error: str = ""
    """Code of what it failed with."""

    paused_s: float = 0.0
    """Seconds that the times are behind the machine's monotonic clock (LoopClock)."""


class Drained(SchedulerReply, frozen=True, kw_only=True):
    """No request is left."""


class StatsReply(SchedulerReply, frozen=True, kw_only=True):
    """Answer to QueryStats with the same token."""

    token: int
    stats: Stats
    experts: tuple[ExpertLoad, ...] = ()
    """Rows per expert, of every rank that has experts."""


class StatusReply(SchedulerReply, frozen=True, kw_only=True):
    """Answer to QueryStatus with the same token."""

    token: int
    status: SchedulerStatus


class PrefixReply(SchedulerReply, frozen=True, kw_only=True):
    """Answer to QueryPrefix with the same token."""

    token: int
    pool: PoolForecast
    """Of the replica that has most of it, in its pool and its tiers."""

    load_s: float = 0.0
    """Predicted seconds of loading what is in tiers; 0 while nothing was loaded."""

    has_peer: bool = False
    """A peer from the host that was named has an open session."""

    cost: tuple[float, float] | None = None
    """Predicted seconds of computing a prompt, per squared token and per token; None while they are not known."""

    @property
    def cached(self) -> int:
        """Leading tokens whose KV is in the pool."""
        return self.pool.cached


class ForecastReply(SchedulerReply, frozen=True, kw_only=True):
    """Answer to QueryForecast with the same token."""

    token: int
    report: ForecastReport


class Traced(SchedulerReply, frozen=True, kw_only=True):
    """The scheduler's part of a recording."""

    trace: int
    scheduler: SchedulerTrace
    paused_s: float = 0.0
    """Seconds that the times of this part are behind the machine's monotonic clock (LoopClock)."""


class StageTraced(SchedulerReply, frozen=True, kw_only=True):
    """A stage's part of a recording."""

    trace: int
    stage: int
    spans: bytes
    """An encoded headrace.core.trace.StageTrace."""


class RecordingWritten(SchedulerReply, frozen=True, kw_only=True):
    """Answer to WriteRecording with the same token."""

    token: int
    name: str
    """Of the file in the folder of recordings; "" where none could be written, or none was due."""

    bytes: int = 0
    error: str = ""
    """Why none could be written."""


AnySchedulerReply = (
    EngineState
    | ServerInfo
    | StageDown
    | PrefillState
    | PrefillDecided
    | Reserved
    | Progress
    | Promised
    | Tokens
    | HiddenPart
    | LogprobPart
    | KvDigested
    | Held
    | RequestFinished
    | RequestFailed
    | RequestTraced
    | KvHinted
    | Drained
    | StatsReply
    | StatusReply
    | PrefixReply
    | ForecastReply
    | Traced
    | StageTraced
    | RecordingWritten
)
