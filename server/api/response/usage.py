"""Usage, times and handoff statistics in responses."""

from typing import Any

from headrace.core.types.requests.request import Timing, Usage
from headrace.server.frontend.request.generation_request import GenerationResult


def usage_report(usages: list[Usage], completion_tokens: int) -> dict[str, Any]:
    """OpenAI's "usage" object. usages: one for each prompt."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }


def timing_report(timing: Timing, *, decode: bool) -> dict[str, float]:
    """Milliseconds by phase; total is the sum of the rounded values. decode: include the time after the first token."""
    phases = {
        "queue": timing.queue_s,
        "bootstrap": timing.bootstrap_s,
        "forward": timing.forward_s,
        "transfer": timing.transfer_s,
    }
    if decode:
        phases["decode"] = timing.decode_s
    report = {name: round(1000 * seconds, 3) for name, seconds in phases.items()}
    return {**report, "total": round(sum(report.values()), 3)}


def handoff_report(result: GenerationResult) -> dict[str, int]:
    """Pages, bytes and chunks that were transferred."""
    return {"pages": result.handoff.pages, "bytes": result.handoff.bytes, "chunks": result.handoff.chunks}


def headrace_report(result: GenerationResult) -> dict[str, Any]:
    """The "headrace" object of OpenAI responses: times and handoff of the first choice."""
    return {"timing_ms": timing_report(result.timing, decode=True), "handoff": handoff_report(result)}
