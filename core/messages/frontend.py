"""Messages of the front end to the scheduler (msgpack)."""

from typing import Literal

import msgspec

from headrace.core.types.errors import ErrorInfo
from headrace.core.types.kv.kv_files import KvFile
from headrace.core.types.requests.constraint import Constraint
from headrace.core.types.requests.images import ImageInput
from headrace.core.types.requests.kv_hints import HintAction
from headrace.core.types.requests.request import AnyRoute, DecodeHere, Discard, SamplingParams
from headrace.core.types.requests.terms import RequestTerms


class FrontendRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag=True):
    """Base of the front end's messages to the scheduler."""


class Submit(FrontendRequest, frozen=True, kw_only=True):
    """One prompt to compute or fetch, and to decode, hand over or drop."""

    rid: str
    """Unique id of the request."""

    prompt: bytes
    """Packed int32 token ids."""

    sampling: SamplingParams
    route: AnyRoute = DecodeHere()
    """Where the KV comes from and where it goes."""

    terms: RequestTerms = RequestTerms()
    images: tuple[ImageInput, ...] = ()
    """Images of the prompt, by their places."""

    progress: bool = False
    """Send Progress messages."""

    constraint: Constraint | None = None
    """What the generated text has to match; it compiles, as the front end has made sure."""

    traceparent: str = ""
    """The span, as W3C Trace Context writes it, whose children the spans of this request are; "": none are wanted."""

    open: bool = False
    """A piece of an open prompt, of route Discard: it is computed where nothing else is to be, and ends without a
    token. Abort(finish=True) ends it with what is planned."""

    audit: float | None = None
    """Route FetchFrom: digest one of the whole pages of the prompt that are fetched, the one at this share of them, in
    [0, 1), before the request's first pass here (KvDigested)."""

    digest: tuple[int, int] | None = None
    """Digest the KV of these positions, [start, end), once it is computed (KvDigested)."""

    moved: bool = False
    """It was admitted before, and is fetched from another prefill server now: neither a full queue nor a drain refuses
    it."""

    follows: str = ""
    """Rid of an attempt at it that has failed, or is late, where its own is another one: it goes on from what has come
    of that one's KV."""


def open_piece(rid: str, prompt: bytes, terms: RequestTerms) -> Submit:
    """A piece of an open prompt that begins with these tokens."""
    sampling = SamplingParams(max_tokens=1)
    return Submit(rid=rid, prompt=prompt, sampling=sampling, route=Discard(), terms=terms, progress=True, open=True)


class Abort(FrontendRequest, frozen=True, kw_only=True):
    """End a request. Answered by RequestFailed, or RequestFinished, unless the request has already ended."""

    rid: str
    error: ErrorInfo | None = None
    """Why it fails; None: it was cancelled."""

    finish: bool = False
    """The request is complete (a stop string was seen), and finishes."""


class KvHint(FrontendRequest, frozen=True, kw_only=True):
    """What is to become of the KV of a prompt that the prefix cache has, or its tiers. Answered by KvHinted."""

    token: int
    prompt: bytes
    """Packed int32 token ids."""

    terms: RequestTerms = RequestTerms()
    """Tenant, salt and adapter of the prompt."""

    actions: tuple[HintAction, ...]


class RefuseTicket(FrontendRequest, frozen=True, kw_only=True):
    """A prompt was refused before it was submitted: tell the peer that has reserved its ticket, or will."""

    ticket: str
    error: ErrorInfo


class ReleaseTicket(FrontendRequest, frozen=True, kw_only=True):
    """A request to fetch a ticket was refused before it was submitted: tell the prefill server, to which a router has
    posted the prompt, that the ticket will not be reserved."""

    prefill: str
    ticket: str
    reason: str


class AddPrefill(FrontendRequest, frozen=True, kw_only=True):
    """Connect to a prefill server's control endpoint."""

    name: str
    """Its URL as configured."""

    endpoint: str
    """tcp://host:port"""

    server_key: str = ""
    """Its CURVE public key; "" to connect in the clear."""


class RemovePrefill(FrontendRequest, frozen=True, kw_only=True):
    """Disconnect from a prefill server."""

    name: str


class ListKvFiles(FrontendRequest, frozen=True, kw_only=True):
    """All KV files that are to be used, each time they are looked for. Files that are not among them any more are
    forgotten; pages that could not be loaded since are tried again."""

    files: tuple[KvFile, ...]


class Drain(FrontendRequest, frozen=True, kw_only=True):
    """Refuse new work; answered by Drained when the last request has ended."""


class QueryStats(FrontendRequest, frozen=True, kw_only=True):
    """Ask for a Stats snapshot; doubles as the liveness probe of the scheduler's loop."""

    token: int


class QueryStatus(FrontendRequest, frozen=True, kw_only=True):
    """Ask for a SchedulerStatus, answered by StatusReply. Plans are recorded for some seconds after each."""

    token: int
    requests: int
    """Open requests to list, at most."""


class QueryPrefix(FrontendRequest, frozen=True, kw_only=True):
    """Ask what the prefix cache has of a prompt, and what computing the rest is expected to take; answered by
    PrefixReply."""

    token: int
    prompt: bytes
    """Packed int32 token ids."""

    salt: str = ""
    """RequestTerms.prefix_salt"""

    tenant: str = ""
    """Who is to retain it."""

    host: str = ""
    """Of a server that may be a peer; "" for none."""


class QueryForecast(FrontendRequest, frozen=True, kw_only=True):
    """Ask what is forecast of the queue, answered by ForecastReply. Has a new forecast made, unless the last one is
    still good."""

    token: int


class StartTrace(FrontendRequest, frozen=True, kw_only=True):
    """Record a trace of the scheduler and its stages. A recording that is under way is dropped."""

    trace: int


class EndTrace(FrontendRequest, frozen=True, kw_only=True):
    """End the recording; answered by Traced, and by StageTraced from each of the stages that Traced counts."""

    trace: int


class WriteRecording(FrontendRequest, frozen=True, kw_only=True):
    """Write what the flight recorder has into a file; answered by RecordingWritten. Only to a server that records."""

    token: int
    reason: Literal["request", "signal", "alert"]
    alerts: str = ""
    """The alerts that fire, in words: of reason alert."""


class StageLost(FrontendRequest, frozen=True, kw_only=True):
    """The supervisor saw a stage process end."""

    stage: int
    message: str


class Shutdown(FrontendRequest, frozen=True, kw_only=True):
    """End the scheduler and its stages now; unfinished requests fail, peers are told."""


AnyFrontendRequest = (
    Submit
    | Abort
    | KvHint
    | RefuseTicket
    | ReleaseTicket
    | AddPrefill
    | RemovePrefill
    | ListKvFiles
    | Drain
    | QueryStats
    | QueryStatus
    | QueryPrefix
    | QueryForecast
    | StartTrace
    | EndTrace
    | WriteRecording
    | StageLost
    | Shutdown
)
