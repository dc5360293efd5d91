"""Typed errors. Every failure reaches its caller as an ErrorInfo: a stable code, a message, an HTTP status."""

from collections.abc import Sequence

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as it is sent between processes and to clients."""

    code: str
    """Stable snake_case identifier that programs may match on."""
    message: str
    """One sentence for people; names the value and the limit."""
    status: int
    """HTTP status of the response."""
    field: str | None = None
    """The offending request field, for 4xx; "prompt" if the model cannot compute it."""
    retry_after_s: float | None = None
    """Seconds after which a retry makes sense, for 429, 503 and 504."""
    stage: int | None = None
    """The pipeline stage that failed, if one did."""
    at_prefill: bool = False
    """On a decode server: a prefill server, or the KV from it, failed the request. Another one may do better."""


class HeadraceError(Exception):
    """An ErrorInfo as an exception."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class ConfigError(Exception):
    """A mistake in flags, configuration files or model files; the message says what to write instead."""


class UnknownModel(ConfigError):
    """A model, as far as its configuration says, that our own layers do not compute."""


def invalid(field: str, message: str, *, code: str = "invalid_value", status: int = 400) -> HeadraceError:
    """Makes a 4xx that names the request field at fault."""
    return HeadraceError(ErrorInfo(code=code, message=message, status=status, field=field))


def shown(text: str, chars: int = 100) -> str:
    """A client's or peer's text as error messages repeat it: cut to so many characters, with its length if it was."""
    return text if len(text) <= chars else f"{text[:chars]}... ({len(text)} characters)"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """The first of these names as error messages list them, with the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


NOT_NOW = (429, 503)  # statuses of a server that may take the same later

# Codes that more than one package uses. What is refused with 429 or 503: core/types/refusals.py
CANCELLED = "cancelled"  # 499: by the client or the peer
PEER_GONE = "peer_gone"  # 502: the session has ended; 504: no message within the peer timeout
NO_PEER = "no_peer"  # 504: no peer reserved pages in time
QUEUE_FULL = "queue_full"  # 429
SLO_UNREACHABLE = "slo_unreachable"  # 429: the first token is predicted later than is wanted
TICKET_IN_USE = "ticket_in_use"  # 409
TOO_LONG = "prompt_too_long"  # 400
DRAINING = "draining"  # 503
NOT_READY = "not_ready"  # 503
STAGE_FAILED = "stage_failed"  # 503
TOO_MANY_TICKETS = "too_many_tickets"  # 429: of one session
CHECKSUM = "checksum_mismatch"  # 502
LEASE_EXPIRED = "lease_expired"  # 504: no peer fetched a held ticket in time
UNKNOWN_RID = "unknown_rid"  # 404
MODEL_NOT_FOUND = "model_not_found"  # 404: a model or an adapter that is not served
GRAMMAR_REJECTED = (
    "grammar_rejected"  # 502: a first token that the constraint does not allow; 503: none can be found here
)
DEADLINE = "deadline_exceeded"  # 504: the request's own deadline_s has passed
PREFILL_NEEDED = "prefill_needed"  # a client wanted it only if its prompt was cached
PAGES_NEEDED = "pages_needed"  # 503: KV that was only moved between prefix caches gave way to a request
NOT_CACHED = "not_cached"  # 412: the prefix cache has less of the tokens than is asked for
PREFILL_FAILED = "prefill_failed"  # 502: a prefill server answered what it should not
PREFILL_LOST = "prefill_lost"  # 502: the connection to a prefill server ended before it had answered
PREFILL_UNREACHABLE = "prefill_unreachable"  # 502: no connection to a prefill server; 504: none within seconds
NONFINITE = "nonfinite_values"  # 500: the model's results for a request are NaN or infinite
