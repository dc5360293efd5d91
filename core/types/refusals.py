"""Every refusal with 429 or 503: code, status, sentence, Retry-After, and the limit that it is about.

What is counted, and compared with a limit, stays where it is known; what clients are told is decided here. Errors of
other servers that are passed on keep what those have said. docs/architecture.md lists the table.
"""

from typing import Literal

import msgspec

from headrace.core.types import errors
from headrace.core.types.errors import ErrorInfo, HeadraceError

RetryAfter = float | Literal["predicted"] | None


class Refusal(msgspec.Struct, frozen=True):
    """A kind of refusal, of which error() makes the error that clients and peers see."""

    status: Literal[429, 503]
    code: str
    text: str
    """The sentence; names in braces are facts that error() gets."""
    when: str
    """When it is decided, for people."""
    limit: str = ""
    """The flag or the bound that it comes from."""
    retry_s: RetryAfter = 1.0
    """Seconds of Retry-After; None: there is none; predicted: computed where it is refused."""

    def error(
        self,
        *,
        predicted_s: float | None = None,
        stage: int | None = None,
        at_prefill: bool = False,
        **facts: object,
    ) -> ErrorInfo:
        """The error. facts: what the sentence names. predicted_s: Retry-After where it is predicted; None for none."""
        return ErrorInfo(
            code=self.code,
            message=self.text.format(**facts),
            status=self.status,
            retry_after_s=predicted_s if self.retry_s == "predicted" else self.retry_s,
            stage=stage,
            at_prefill=at_prefill,
        )

    def raised(self, **facts: object) -> HeadraceError:
        """error() as an exception."""
        return HeadraceError(self.error(predicted_s=None, stage=None, at_prefill=False, **facts))


def _full(
    text: str,
    when: str,
    limit: str = "",
    retry_s: RetryAfter = 1.0,
    code: str = errors.QUEUE_FULL,
) -> Refusal:
    return Refusal(429, code, text, when, limit, retry_s)


def _down(code: str, text: str, when: str, limit: str = "", retry_s: float | None = 1.0) -> Refusal:
    return Refusal(503, code, text, when, limit, retry_s)


# Too much at a time. Limits of tenants and clients let those in that have less than an equal share.
OPEN_BY_KEY = _full(
    "{own} requests of this API key are open, of {total} in all; retry",
    "requests with keys that are open (HTTP)",
    "half of the HTTP connections (`CONNECTIONS`)",
)
OPEN_REQUESTS = _full(
    "{most} requests are open, which is the limit", "requests that are open (front end)", "`--max-queued-requests`"
)
OPEN_PROMPTS = _full(
    "{own} prompts of this API key are open, which is the limit; commit or delete one",
    "open prompts of a tenant (`POST /v1/prefill` with `open`)",
    "`--open-prompts`",
)
AUDITS = _full(
    "a page is computed again for another decode server, one at a time; retry",
    "pages that decode servers have computed again (`POST /v1/audits`)",
    "one at a time",
)
CLIENT_WAITS = _full(
    "{own} {what} of this client wait, of {total} in all; retry",
    "constraints or first tokens that wait for the child process",
    "64 that wait",
    2.0,
)
HIDDEN_STATES = _full(
    "hidden states of open requests take {taken} bytes; {wanted} more exceed {most}",
    "hidden states that open requests ask for",
    "128 MiB, or `--max-hidden-bytes` if that is more",
)
IMAGES = _full(
    "images of open requests take {taken} bytes; {wanted} more exceed {most}",
    "images of requests that are open (front end)",
    "192 MiB: their files, and what the encoder takes",
)
QUEUED_TOKENS = _full(
    "{queued} prompt tokens are queued; {own} more exceed the limit of {limit}",
    "prompt tokens that wait (scheduler)",
    "`--max-queued-tokens`",
    "predicted",
)
QUEUED_REQUESTS = _full(
    "{queued} requests are queued, which is the limit",
    "requests that wait (scheduler)",
    "`--max-queued-requests`",
    "predicted",
)
QUEUED_SECONDS = _full(
    "{queued:.3f} s of work are queued; {own:.3f} s more exceed the limit of {limit:g} s",
    "predicted work that waits",
    "`--max-queued-seconds`",
    "predicted",
)
LATE_FOR_SERVER = _full(
    "the first token is predicted in {predicted:.3f} s; this server promises {limit:g} s",
    "predicted time to first token",
    "`--max-predicted-ttft`",
    "predicted",
    errors.SLO_UNREACHABLE,
)
LATE_FOR_REQUEST = _full(
    "the first token is predicted in {predicted:.3f} s; slo_ttft_ms wants it in {wanted:.3f} s",
    "predicted time to first token, for the request's slo_ttft_ms",
    "`--refuse-unreachable`",
    "predicted",
    errors.SLO_UNREACHABLE,
)
LATE_ALONE = _full(
    LATE_FOR_REQUEST.text + ", and the prompt takes {alone:.3f} s alone",
    "the same, for a prompt that would be late on an idle server",
    "`--refuse-unreachable`",
    None,
    errors.SLO_UNREACHABLE,
)
NOT_PROMISED = _full(
    "the first token can be promised within {bound:.3f} s; slo_ttft_ms wants it in {wanted:.3f} s",
    "promised time to first token, for the request's slo_ttft_ms",
    "`--promise`",
    "predicted",
    errors.SLO_UNREACHABLE,
)
HELD_PAGES = _full(
    "{held} KV pages are held for peers that have not come; {pages} more exceed {limit}",
    "KV that is held for a later fetch",
    "`--hold-percent`",
)
RESERVATIONS_WAIT = _full(
    "too many reservations wait for their prompts", "reservations of a peer without a prompt", retry_s=None
)
TICKETS_OPEN = _full(
    "{open} tickets of this peer are open, and {limit} is the limit",
    "open tickets of a session",
    code=errors.TOO_MANY_TICKETS,
)
TICKET_PAGES = _full(
    "open tickets of this peer have {pages} pages, and {limit} are the limit",
    "pages of open tickets of a session",
    code=errors.TOO_MANY_TICKETS,
)
ROOMS_OPEN = _full("{most} rooms are open", "rooms of an SGLang gateway", "`RoomLimits.rooms`", None)
ROOM_GAVE_WAY = _full(
    "{most} rooms are open, and this one has had no request for the longest time",
    "a room that makes place for another",
    "`RoomLimits.rooms`",
    None,
)
BODIES = _down(
    "too_many_bodies",
    "bodies that are being received take {used} bytes, and the limit for all of them is {limit}; retry, or send less "
    "in one request",
    "bodies that are being received",
    "64 MiB, or 8 of the largest bodies",
)
CONNECTIONS = _down(
    "too_many_connections",
    "too many connections are open, each with a request; retry",
    "connections, all of them with a request",
    "half of the spare descriptors (`ulimit -n`), at most 16,384",
)

# Beginning and end of a server.
LOADING = _down(errors.NOT_READY, "the server is loading", "before the stages or the tokenizer are there")
NO_TOKENIZER = _down(
    errors.NOT_READY, "the server is loading: its tokenizer is not there yet", "stages are up, the tokenizer is not"
)
ENGINE_DOWN = _down(errors.NOT_READY, "{reason}", "a stage has failed and starts again (front end)")
NOT_READY = _down(errors.NOT_READY, "the server is not ready", "the stages are not up (scheduler)")
NOT_READY_FOR_PEER = _down(errors.NOT_READY, NOT_READY.text, "the same, to a peer that reserves", retry_s=None)
DRAINING = _down(errors.DRAINING, "the server is draining", "after the signal to end", "`--drain-timeout`")
DRAINING_FOR_PEER = _down(errors.DRAINING, DRAINING.text, "the same, to a peer that reserves", retry_s=None)
STOPPING = _down(errors.DRAINING, "the server is stopping", "when the time for draining is over", "`--drain-timeout`")
SHUTDOWN = _down("shutdown", "the server is shutting down", "requests that the end of the scheduler ends", retry_s=None)
STOPPED = _down("stopped", "the server has stopped", "requests that the end of the front end ends", retry_s=None)
GATEWAY_STARTING = _down(errors.NOT_READY, "the gateway is starting{waiting}", "before both sides have answered")
GATEWAY_DRAINING = _down(
    errors.DRAINING, "the gateway is draining", "after the signal to end a gateway", "`--drain-timeout`"
)
GATEWAY_STOPPED = _down(
    "unavailable", "the gateway has stopped", "requests that the end of a gateway ends", retry_s=None
)

# A part does not work.
STAGE_FAILED = _down(
    errors.STAGE_FAILED, "{name} failed: {message}", "a stage has died, hangs or reports an error", retry_s=None
)
PAGES_NEEDED = _down(
    errors.PAGES_NEEDED,
    "its pages, or its metadata row, are needed for a request",
    "KV that only moves between prefix caches (siblings, returns, open prompts) gives way, or finds no room",
    retry_s=None,
)
NOT_AUDITED = _down(
    "unavailable",
    "the page was not computed: its KV pages were needed for requests, or this server drains",
    "what is computed for an audit gives way",
    retry_s=None,
)
NO_TOKEN = _down(errors.STAGE_FAILED, "the last stage reported no token", "a plan came back without one", retry_s=None)
UNHEALTHY = _down("unhealthy", "{problem}", "a thread or process without which nothing is served has ended")
SCHEDULER_SILENT = _down("scheduler_silent", "{problem}", "the scheduler does not answer: new requests")
SCHEDULER_HANGS = _down(
    "scheduler_silent", "the scheduler {finding}", "the scheduler hangs: open requests", retry_s=None
)
SCHEDULER_LOST = _down(
    "scheduler_lost", "the scheduler of this server has ended", "its process has ended: open requests", retry_s=None
)
NO_TRACE = _down("scheduler_silent", "the scheduler did not answer within {seconds:g} s", "a trace is asked for")
CHECK_LATE = _down(
    "unavailable", "the constraint could not be checked in time; retry", "the child that checks constraints is late"
)
CHECKER_ENDED = _down(
    "unavailable", "the process that checks constraints has ended; retry", "the child that checks constraints has ended"
)
NO_CHECKER = _down(
    "unavailable",
    "the process that checks constraints does not start",
    "that child cannot be started",
)
CANNOT_CHECK = _down(
    "unavailable", "this server cannot check constraints: {why}", "the child cannot use the model's tokenizer"
)
STEP_TOO_COSTLY = _down(errors.GRAMMAR_REJECTED, "{problem}", "no first token can be found under a constraint")

# The other side is not there.
SESSION_DOWN = _down("no_prefill", "prefill server {name} is {why}", "no session with the prefill server (scheduler)")
NO_PREFILL_SERVER = _down("no_prefill_server", "{problem}", "no prefill server is reachable", "`--fallback`")
PREFILL_DOWN = _down("no_prefill_server", "prefill server {url}: {reason}", "the prefill server of a request is down")
PREFILLS_NAMED = _down(
    "no_prefill_server",
    "{most} prefill servers that requests have named are in use",
    "prefill servers that requests name",
    "64 at a time",
)
_OLD = (
    "the prefill server {names} is of a version without {what}; upgrade it, or start this server with --fallback local"
)
NO_STRUCTURED_OUTPUT = _down("no_structured_output", _OLD, "no prefill server knows constraints", "`--fallback`")
NO_PENALTIES = _down("no_penalties", _OLD, "no prefill server knows penalties and logit_bias", "`--fallback`")
NO_HIDDEN_STATES = _down("no_hidden_states", _OLD, "no prefill server knows hidden states", "`--fallback`")
NO_IMAGES = _down("no_images", _OLD, "no prefill server takes images", "`--fallback`")
NO_DECODE_ENGINE = _down("no_decode_engine", "{problem}", "no decode engine fits, or is up (gateway)")
DISCOVERY_UNREADABLE = _down("unavailable", "GET {path} sent an unexpected response: {error}", "a server is looked for")
DISCOVERY_FAILED = _down("unavailable", "GET {path} failed: {error}", "a server is looked for and does not answer")
DISCOVERY_REFUSED = _down("unavailable", "GET {path} answered {answer}", "a server is looked for and answers an error")

TABLE: dict[str, Refusal] = {name: kind for name, kind in list(globals().items()) if isinstance(kind, Refusal)}
"""All of them, by name."""
