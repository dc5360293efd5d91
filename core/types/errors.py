"""Typed errors. Every failure reaches its caller as an ErrorInfo: a stable code, a sentence, an HTTP status."""

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, in the form that travels between processes and peers.

    code: stable snake_case word that programs may match on.
    message: one sentence for people; names the value and the limit.
    status: HTTP status the front end answers with.
    field: the offending request field, for 4xx.
    retry_after_s: seconds after which a retry makes sense, for 429 and 503.
    stage: the pipeline stage that failed, where one did.
    """

    code: str
    message: str
    status: int
    field: str | None = None
    retry_after_s: float | None = None
    stage: int | None = None


class HeadraceError(Exception):
    """Carries an ErrorInfo through Python code."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


class ConfigError(Exception):
    """A mistake in flags, configuration files or model files; the message says what to write instead."""


def invalid(field: str, message: str, *, code: str = "invalid_value", status: int = 400) -> HeadraceError:
    """A 4xx that names the request field at fault."""
    return HeadraceError(ErrorInfo(code=code, message=message, status=status, field=field))


def unavailable(message: str, *, code: str = "unavailable", retry_after_s: float = 1.0) -> HeadraceError:
    """A 503: the server is alive and cannot serve this now."""
    return HeadraceError(ErrorInfo(code=code, message=message, status=503, retry_after_s=retry_after_s))


# Codes that more than one part uses.
CANCELLED = "cancelled"  # 499: the client or the peer took the request back
PEER_GONE = "peer_gone"  # 502: the other side fell silent
NO_PEER = "no_peer"  # 504: nobody reserved pages in time
QUEUE_FULL = "queue_full"  # 429
TICKET_IN_USE = "ticket_in_use"  # 409
TOO_LONG = "prompt_too_long"  # 400
DRAINING = "draining"  # 503
NOT_READY = "not_ready"  # 503
STAGE_FAILED = "stage_failed"  # 503
CHECKSUM = "checksum_mismatch"  # 502
LEASE_EXPIRED = "lease_expired"  # 504: nobody came for a held ticket in time
UNKNOWN_RID = "unknown_rid"  # 404
