"""Audits: a decode server has a page of KV computed again by another prefill server, and compares."""

from typing import Literal, get_args

AuditResult = Literal[
    "equal",
    "different",
    "no_page",
    "unsupported",
    "no_server",
    "other_computation",
    "busy",
    "late",
    "failed",
]
"""What became of an audit. All but the first two were skipped: no whole page was fetched, or the answer ended before
its first pass; images or an adapter; no other prefill server is up; none that computes the same bits; an audit is under
way, or the other server is full, or drains; no answer in time; no answer, or none that can be compared."""

AUDIT_RESULTS: tuple[AuditResult, ...] = get_args(AuditResult)
AUDITS_PATH = "/v1/audits"
