"""Which errors of a prefill server move a prompt to another one, and what a client is told when none is left."""

import pytest

from headrace.core.types.errors import ErrorInfo
from headrace.server.routing import failover
from headrace.server.routing.failover import (
    MAX_SUSPICIONS,
    MOVE_REASONS,
    PrefillAttempts,
    avoided_s,
    client_error,
    move_reason,
)

A, B, C, D = (f"http://10.0.0.{number}:8000" for number in range(1, 5))

TABLE = [
    # the request's own fault, or its end: the same everywhere
    ("prompt_too_long", 400, None),
    ("invalid_value", 400, None),
    ("body_too_large", 413, None),
    ("invalid_value", 422, None),
    ("cancelled", 499, None),
    ("deadline_exceeded", 504, None),
    # another server may do better
    ("prefill_unreachable", 502, "unreachable"),
    ("prefill_lost", 502, "lost"),
    ("peer_gone", 502, "lost"),
    ("stage_failed", 503, "lost"),
    ("queue_full", 429, "overloaded"),
    ("slo_unreachable", 429, "overloaded"),
    ("too_many_tickets", 429, "overloaded"),
    ("draining", 503, "unavailable"),
    ("not_ready", 503, "unavailable"),
    ("shutdown", 503, "unavailable"),
    ("no_prefill", 503, "unavailable"),
    ("no_peer", 504, "silent"),
    ("no_request", 404, "silent"),
    ("checksum_mismatch", 502, "damaged"),
    ("bad_metadata", 502, "damaged"),
    ("nonfinite_values", 500, "nonfinite"),
    ("bad_reservation", 400, "failed"),
    ("bad_reservation", 502, "failed"),
    ("ticket_in_use", 409, "failed"),
    ("prefill_failed", 502, "failed"),  # a wrong API key, no such route, an internal error
    ("a code of a later version", 507, "failed"),
]


def error(code: str, status: int, message: str = "no", retry_after_s: float | None = None, **more: bool) -> ErrorInfo:
    fields = {"at_prefill": True, **more}
    return ErrorInfo(code=code, message=message, status=status, retry_after_s=retry_after_s, **fields)


@pytest.mark.parametrize(("code", "status", "reason"), TABLE)
def test_what_moves_a_prompt(code: str, status: int, reason: str | None) -> None:
    assert move_reason(error(code, status)) == reason
    assert move_reason(error(code, status, at_prefill=False)) is None, "of this server itself"


def test_every_reason_occurs() -> None:
    assert {reason for _, _, reason in TABLE} - {None} == set(MOVE_REASONS)


def test_the_error_of_the_only_server_stays_as_it_is() -> None:
    attempts = PrefillAttempts()
    only = error("draining", 503, "bye", 2.0)
    attempts.failed(A, only)
    assert attempts.may_move
    assert attempts.error() == only


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 413, 422, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("code", failover._REASONS_BY_CODE)
def test_a_servers_fault_is_no_fault_of_the_client(code: str, status: int) -> None:
    """Whatever its status is under the protocol between the servers: below 429 nobody repeats a request."""
    told = client_error(error(code, status))
    assert told.status == status if status >= 429 else told.status in (502, 504)
    if told.status in (503, 504):
        assert told.retry_after_s is not None
    attempts = PrefillAttempts()
    attempts.failed(A, error(code, status))
    assert attempts.error() == told
    attempts.failed(B, error(code, status))
    assert attempts.error().status == told.status


@pytest.mark.parametrize("known", [row for row in TABLE if row[2] is None])
def test_what_is_no_servers_fault_stays_as_it_is(known: tuple[str, int, None]) -> None:
    code, status, _ = known
    assert client_error(error(code, status)) == error(code, status)
    assert client_error(error("no_request", 404, at_prefill=False)).status == 404


def test_a_silent_server_says_504_and_when_to_try_again() -> None:
    told = client_error(error("no_request", 404))
    assert (told.code, told.status, told.retry_after_s) == ("no_request", 504, 1.0)
    assert client_error(error("no_peer", 504, retry_after_s=7.0)).retry_after_s == 7.0


def test_all_servers_are_named() -> None:
    attempts = PrefillAttempts()
    attempts.failed(A, error("prefill_lost", 502, f"prefill server {A}: ReadError connection reset"))
    attempts.failed(B, error("queue_full", 429, "overloaded", 3.0))
    told = attempts.error()
    assert told.message == "prefill servers 10.0.0.1:8000: ReadError connection reset; 10.0.0.2:8000: overloaded"
    assert (told.code, told.status, told.retry_after_s) == ("prefill_failed", 502, None)
    assert attempts.servers == [A, B]


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([("queue_full", 429, 7.0), ("queue_full", 429, 2.0), ("queue_full", 429, None)], ("queue_full", 429, 2.0)),
        ([("queue_full", 429, 7.0), ("draining", 503, 1.0)], ("draining", 503, 1.0)),
        ([("draining", 503, 1.0), ("queue_full", 429, 7.0)], ("prefill_failed", 503, 1.0)),
        ([("queue_full", 429, 7.0), ("prefill_lost", 502, None)], ("prefill_lost", 502, None)),
        ([("nonfinite_values", 500, None)] * 2, ("nonfinite_values", 500, None)),
        ([("no_peer", 504, None)] * 2, ("no_peer", 504, 1.0)),
        ([("no_request", 404, None)] * 2, ("no_request", 504, 1.0)),
        ([("no_request", 404, None), ("draining", 503, 3.0)], ("draining", 503, 1.0)),
        ([("unknown_ticket", 404, None), ("bad_reservation", 400, None)], ("bad_reservation", 502, None)),
        ([("draining", 503, 1.0), ("prompt_too_long", 400, None)], ("prompt_too_long", 400, None)),
    ],
)
def test_the_status_that_several_servers_amount_to(
    errors: list[tuple[str, int, float | None]], told: tuple[str, int, float | None]
) -> None:
    attempts = PrefillAttempts()
    for server, (code, status, retry) in zip((A, B, C), errors, strict=False):
        attempts.failed(server, error(code, status, retry_after_s=retry))
    info = attempts.error()
    assert (info.code, info.status, info.retry_after_s) == told


def test_a_prompt_that_ends_its_servers_does_not_reach_all_of_them() -> None:
    attempts = PrefillAttempts()
    attempts.failed(A, error("queue_full", 429))
    for server in (B, C, D)[: MAX_SUSPICIONS - 1]:
        attempts.failed(server, error("peer_gone", 502))
        assert attempts.may_move
    attempts.failed(D, error("stage_failed", 503))
    assert not attempts.may_move


def test_a_long_text_of_a_server_is_cut() -> None:
    attempts = PrefillAttempts()
    for server in (A, B):
        attempts.failed(server, error("draining", 503, "x" * 100_000))
    assert len(attempts.error().message) < 1000


@pytest.mark.parametrize(
    ("refusal", "seconds"),
    [
        (error("prefill_lost", 502), 1.0),
        (error("draining", 503, retry_after_s=30.0), 1.0),
        (error("queue_full", 429, retry_after_s=0.2), 0.2),
        (error("queue_full", 429, retry_after_s=30.0), 1.0),
        (error("queue_full", 429), 1.0),
        (error("slo_unreachable", 429, retry_after_s=5.0), 0.0),
        (error("too_many_tickets", 429, retry_after_s=1.0), 0.0),
    ],
)
def test_how_long_later_prompts_go_elsewhere(refusal: ErrorInfo, seconds: float) -> None:
    reason = move_reason(refusal)
    assert reason is not None
    assert avoided_s(refusal, reason, 1.0) == seconds
