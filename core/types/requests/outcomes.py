"""How requests end, for metrics: an outcome and a reason, out of a closed set that is known from the start."""

from typing import Literal, NamedTuple

from headrace.core.types import errors
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.peers.allow_list import PREFILL_NOT_ALLOWED

Outcome = Literal["finished", "failed", "refused", "cancelled"]

HANDOFF = "handoff"  # its KV went to a peer, which goes on
HELD = "held"  # its KV is held for a peer
DISCARDED = "discarded"  # no decode peer wanted its KV: "handoff": "none"
FETCHED = "fetched"  # its KV is in the prefix cache, for requests to come
OTHER = "other"  # an error code that is not listed below, of a server of another release, say

FINISHED = ("stop", "length", HANDOFF, HELD, DISCARDED, FETCHED)
"""Reasons of requests that ended well."""

REFUSED = (
    # what the client sent
    "already_committed",
    "body_timeout",
    "body_too_large",
    "empty_prompt",
    "foreign_page",
    "host_not_allowed",
    "image_too_large",
    "image_unavailable",
    "invalid_api_key",
    "invalid_constraint",
    "invalid_json",
    "invalid_token",
    "invalid_type",
    "invalid_value",
    "missing_field",
    "model_not_found",
    "no_chat_template",
    "no_tool_parser",
    "no_tools",
    errors.NOT_CACHED,
    "not_recording",
    errors.PREFILL_NEEDED,
    PREFILL_NOT_ALLOWED,
    errors.TOO_LONG,
    "repeated_field",
    "rid_in_use",
    errors.TICKET_IN_USE,
    "too_many_hidden_states",
    "too_many_images",
    "unknown_field",
    "unsupported",
    "unsupported_content_encoding",
    "wrong_role",
    "wrong_route",
    # what the server cannot do now
    errors.DRAINING,
    "no_decode_engine",
    "no_prefill",
    "no_prefill_server",
    "no_hidden_states",
    "no_images",
    "no_penalties",
    "no_structured_output",
    errors.NOT_READY,
    errors.QUEUE_FULL,
    errors.SLO_UNREACHABLE,
    "too_many_bodies",
    "too_many_tickets",
    OTHER,
)
"""Error codes of requests that were not begun."""

FAILED = (
    "bad_chunk",
    "bad_metadata",
    "bad_prefill_answer",
    "bad_reservation",
    errors.CHECKSUM,
    errors.DEADLINE,
    "decode_failed",
    "decode_unreachable",
    errors.GRAMMAR_REJECTED,
    "internal_error",
    errors.LEASE_EXPIRED,
    errors.NO_PEER,
    "no_request",
    errors.NONFINITE,
    "not_recorded",
    errors.PAGES_NEEDED,
    errors.PEER_GONE,
    errors.PREFILL_FAILED,
    errors.PREFILL_LOST,
    "prefill_refused",
    "room_in_use",
    errors.PREFILL_UNREACHABLE,
    "scheduler_lost",
    "scheduler_silent",
    "shutdown",
    errors.STAGE_FAILED,
    "stopped",
    "unknown_ticket",
    OTHER,
)
"""Error codes of requests that were begun and did not end well."""

_OUTCOMES: dict[str, Outcome] = {
    **dict.fromkeys(REFUSED, "refused"),
    **dict.fromkeys(FAILED, "failed"),
    CANCELLED: "cancelled",
}


class End(NamedTuple):
    """The end of a request as it is counted."""

    outcome: Outcome
    reason: str


ENDS = (
    *(End("finished", reason) for reason in FINISHED),
    *(End("refused", reason) for reason in REFUSED),
    *(End("failed", reason) for reason in FAILED),
    End("cancelled", CANCELLED),
)
"""Everything that can be counted."""


def end_of(error: ErrorInfo) -> End:
    """The end of a request with this error. Codes that are not known go by their status."""
    if error.code in _OUTCOMES and error.code != OTHER:
        return End(_OUTCOMES[error.code], error.code)
    return End("failed" if error.status >= 500 else "refused", OTHER)


def end_of_answer(status: int) -> End:
    """The end of a request that was answered with this HTTP status, without a typed error."""
    return end_of(ErrorInfo(code=CANCELLED if status == 499 else OTHER, message="", status=status))
