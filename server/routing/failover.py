"""Whether a prompt that a prefill server has refused or failed goes to another one, and the error of all of them. Pure.

error ─► move_reason() ─► None: the request fails with it
                      └─► reason ─► PrefillAttempts ─► the pool's choice among the other servers
                                                   └─► no other, or too many were lost: the error that names them all

Only prompts that this server posts itself are moved, and only before their first token: one whose prefill server was
chosen by a client or a router is theirs to send again.
"""

from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from headrace.core.types.errors import (
    CANCELLED,
    CHECKSUM,
    DEADLINE,
    NONFINITE,
    PEER_GONE,
    PREFILL_FAILED,
    PREFILL_LOST,
    PREFILL_UNREACHABLE,
    QUEUE_FULL,
    STAGE_FAILED,
    ErrorInfo,
    shown,
)

MoveReason = Literal["unreachable", "lost", "overloaded", "unavailable", "silent", "damaged", "nonfinite", "failed"]

MOVE_REASONS: tuple[MoveReason, ...] = (
    "unreachable",  # the connection was refused, or not accepted in time
    "lost",  # its connection, its session or one of its stages ended while it had the prompt
    "overloaded",  # 429: its queue is full, its decode peers have their quotas, an objective cannot be met there
    "unavailable",  # 503: it drains, is not ready, or was down before the prompt was posted
    "silent",  # 504, or the prompt never reached it
    "damaged",  # checksums did not fit, or the first token cannot be of this prompt
    "nonfinite",  # NaN or infinite results
    "failed",  # all else that is not the request's fault: wrong API key, no such route, internal errors
)
MAX_SUSPICIONS = 3
"""Servers that may be lost, or compute NaN, with one prompt: a prompt that ends the servers that compute it must not
reach all of them."""

MESSAGE_CHARS = 200
RETRY_AFTER_S = 1.0  # where a server could not say it
_RETRIED = (503, 504)
_SUSPICIOUS: tuple[MoveReason, ...] = ("lost", "nonfinite")
_FINAL_CODES = (CANCELLED, DEADLINE)
_REASONS_BY_CODE: dict[str, MoveReason] = {
    PREFILL_UNREACHABLE: "unreachable",
    PREFILL_LOST: "lost",
    PEER_GONE: "lost",
    STAGE_FAILED: "lost",
    "no_request": "silent",
    CHECKSUM: "damaged",
    "bad_metadata": "damaged",
    NONFINITE: "nonfinite",
    "bad_reservation": "failed",  # 400 under the protocol: the two servers differ, the client has nothing to do with it
    "unknown_ticket": "failed",
    "ticket_in_use": "failed",
}
_REASONS_BY_STATUS: dict[int, MoveReason] = {429: "overloaded", 503: "unavailable", 504: "silent"}


def move_reason(error: ErrorInfo) -> MoveReason | None:
    """Why a prompt goes to another prefill server after this error; None if it does not, since the error is not of a
    prefill server, or another one would answer the same."""
    if not error.at_prefill or error.code in _FINAL_CODES:
        return None
    reason = _REASONS_BY_CODE.get(error.code) or _REASONS_BY_STATUS.get(error.status)
    return reason or ("failed" if error.status >= 500 else None)


def client_error(error: ErrorInfo) -> ErrorInfo:
    """The error as a client is told it, who has nothing to do with what two servers agreed on: statuses of the protocol
    between them (404 for a prompt that did not come, 409, 400) are no answer to a request. A server's fault is 502, or
    504 if the server was silent; 503 and 504 say when to try again. What is not a server's fault stays as it is."""
    reason = move_reason(error)
    if reason is None:
        return error
    status = error.status
    if status < 429:
        status = 504 if reason == "silent" else 502
    retry_after_s = error.retry_after_s
    if retry_after_s is None and status in _RETRIED:
        retry_after_s = RETRY_AFTER_S
    return replace(error, status=status, retry_after_s=retry_after_s)


def avoided_s(error: ErrorInfo, reason: MoveReason, longest_s: float) -> float:
    """Seconds for which later prompts go elsewhere; 0 if the error says nothing of them."""
    if reason != "overloaded":
        return longest_s
    if error.code != QUEUE_FULL:
        return 0.0  # the objective of one prompt, or the quota of one session
    return min(longest_s, error.retry_after_s or longest_s)


class PrefillFailure(msgspec.Struct, frozen=True):
    """A prefill server that has refused or failed a prompt."""

    server: str
    """Its URL."""

    error: ErrorInfo
    reason: MoveReason | None
    """As move_reason() has it."""


class PrefillAttempts:
    """The prefill servers that one prompt has been at."""

    def __init__(self) -> None:
        self.failures: list[PrefillFailure] = []

    def failed(self, server: str, error: ErrorInfo) -> PrefillFailure:
        """Note that a server has refused or failed the prompt."""
        failure = PrefillFailure(server, error, move_reason(error))
        self.failures.append(failure)
        return failure

    @property
    def servers(self) -> list[str]:
        """The URLs of the servers."""
        return [failure.server for failure in self.failures]

    @property
    def may_move(self) -> bool:
        """Whether the prompt may go to another server after the last failure."""
        suspicions = sum(failure.reason in _SUSPICIOUS for failure in self.failures)
        return self.failures[-1].reason is not None and suspicions < MAX_SUSPICIONS

    def error(self) -> ErrorInfo:
        """The error of the request, as a client is told it: that of the only server, or of the last one if its request
        is at fault; else one that names all of them. With the shortest retry_after_s if waiting may help."""
        last = client_error(self.failures[-1].error)
        if len(self.failures) == 1 or self.failures[-1].reason is None:
            return last
        errors = [client_error(failure.error) for failure in self.failures]
        status = self._status({error.status for error in errors})
        retries = [error.retry_after_s for error in errors if error.retry_after_s is not None]
        texts = "; ".join(map(_text, self.failures))
        return ErrorInfo(
            code=last.code if last.status == status else PREFILL_FAILED,
            message=f"prefill servers {texts}",
            status=status,
            field=last.field if last.status == status else None,
            retry_after_s=min(retries) if retries and status in (429, *_RETRIED) else None,
            at_prefill=True,
        )

    def _status(self, statuses: set[int]) -> int:
        """One that all of them agree on, 503 if waiting may help, else 502."""
        reasons = {failure.reason for failure in self.failures}
        if len(statuses) == 1 and min(statuses) in (429, 500, 502, 503, 504):
            return min(statuses)
        return 503 if reasons <= {"overloaded", "unavailable", "silent"} else 502


def _text(failure: PrefillFailure) -> str:
    """What one server has answered, after its host and port."""
    message = failure.error.message.removeprefix(f"prefill server {failure.server}: ")
    return f"{urlsplit(failure.server).netloc}: {shown(message, MESSAGE_CHARS)}"
