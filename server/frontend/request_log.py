"""Request log: one line for each HTTP request with a prompt, with the ids that other servers know it by."""

import json
import logging
import re
from collections.abc import Callable

import msgspec

from headrace.core.runtime.rate_limit import TokenBucket
from headrace.core.types.errors import CANCELLED, ErrorInfo
from headrace.core.types.requests.outcomes import HANDOFF, End, end_of, end_of_answer
from headrace.core.types.requests.request import SamplingParams
from headrace.server.frontend.request.generation_request import GenerationResult
from headrace.server.frontend.request.request_context import RequestContext
from headrace.server.frontend.status.recent_events import RecentEvents
from headrace.server.telemetry.spans import ServedSpan

log = logging.getLogger(__name__)

REFUSALS_PER_S = 5.0  # lines about requests that were refused before a prompt was admitted: any client can cause them
REFUSALS_AT_ONCE = 50
MAX_REASONS = 128  # of a span, which has one for each choice
_PLAIN = re.compile(r"[\x21\x23-\x3c\x3e-\x7e]+")  # needs no quotes


class RequestRecord:
    """What is known of one HTTP request when it ends. A request may have several prompts and choices."""

    def __init__(self, context: RequestContext, now: Callable[[], float] = lambda: 0.0) -> None:
        """now: a clock."""
        self.context = context
        self._now = now
        self._came_at = now()
        self._admitted_at = self._came_at
        self._sampling: SamplingParams | None = None
        self._rids: list[str] = []
        self._results: list[GenerationResult] = []
        self.ttft_bound_s: float | None = None
        """That was promised; None: nothing was."""

        self._first_token_s: float | None = None
        self._error: ErrorInfo | None = None
        self._ends: list[End] = []
        self._open = 0  # prompts and choices that were admitted and have not ended

    @property
    def has_prompt(self) -> bool:
        """Whether a prompt of it was admitted."""
        return bool(self._rids)

    @property
    def error_status(self) -> int:
        """HTTP status of what it failed with, also in the middle of a stream; 0 if it did not."""
        return self._error.status if self._error is not None else 0

    def began(self, rid: str, sampling: SamplingParams) -> None:
        """A prompt was admitted under this request id."""
        self._admitted_at = self._now()
        self._rids.append(rid)
        self._sampling = self._sampling or sampling
        self._open += 1

    def promised(self, bound_s: float) -> None:
        """A choice is to have its first token within so many seconds; the answer's header has the most of them."""
        self.ttft_bound_s = max(bound_s, self.ttft_bound_s or 0.0)

    def first_token(self, seconds: float) -> None:
        """The first token of a choice came so many seconds after its prompt was admitted."""
        self._first_token_s = seconds if self._first_token_s is None else min(seconds, self._first_token_s)

    def ended(self, result: GenerationResult) -> None:
        """A choice ended well."""
        self._results.append(result)
        self._ends.append(End("finished", result.finish_reason or result.kv))
        self._open -= 1

    def failed(self, error: ErrorInfo) -> None:
        """A choice failed. The first error stays."""
        self._open -= 1
        self.refused(error)

    def refused(self, error: ErrorInfo) -> None:
        """A choice was not admitted."""
        self._ends.append(end_of(error))
        self.answered(error)

    def answered(self, error: ErrorInfo) -> None:
        """The client was answered with an error."""
        self._error = self._error or error

    @property
    def around_s(self) -> float | None:
        """Seconds that the first token of its only choice took outside the scheduler; None where none was promised."""
        promise = self._results[0].promise if len(self._results) == 1 else None
        if promise is None or self._first_token_s is None:
            return None
        return max(0.0, self._admitted_at - self._came_at + self._first_token_s - promise.ttft_s)

    def ends(self, status: int) -> list[End]:
        """How its prompts and choices have ended, as they are counted; one end if it had none. status: of the
        response."""
        left = [End("cancelled", CANCELLED)] * self._open  # the client disconnected, or another choice failed
        if self._ends or left:
            return [*self._ends, *left]
        if self._error is not None:
            return [end_of(self._error)]
        return [end_of_answer(status)] if status >= 400 else []

    def fields(self, route: str, status: int, seconds: float) -> dict[str, str | int | float]:
        """What is logged, by name. seconds: from the request's head to the end of the response."""
        fields: dict[str, str | int | float] = {"id": self.context.request_id, "route": route, "status": status}
        if self.context.traceparent:
            fields["trace"] = self.context.trace_id
        if self._rids:
            fields["rid"] = self._rids[0] if len(self._rids) == 1 else f"{self._rids[0]} and {len(self._rids) - 1} more"
        fields["outcome"] = self._outcome(status)
        if self.ttft_bound_s is not None:
            fields["ttft_bound_s"] = round(self.ttft_bound_s, 4)
        if self._results:
            fields |= self._tokens_and_times()
        elif self._first_token_s is not None:
            fields["ttft_s"] = round(self._first_token_s, 4)
        fields["total_s"] = round(seconds, 4)
        if self._error is not None:
            fields["error"] = self._error.message
        return fields

    def span(self, route: str, status: int, start: float, end: float) -> ServedSpan:
        """What its span is made of. start, end: of the response, seconds of the machine's monotonic clock."""
        context = self.context
        return ServedSpan(
            traceparent=context.traceparent,
            tracestate=context.tracestate,
            parent_id=context.parent_id,
            route=route,
            status=status,
            start=start,
            end=end,
            request_id=context.request_id,
            rid=self._rids[0] if self._rids else "",
            prompts=len(self._rids),
            sampling=self._sampling,
            usages=tuple(result.usage for result in self._results),
            finish_reasons=self._reasons()[:MAX_REASONS],
            first_token_s=self._first_token_s,
            prefill=self._decisions(),
            error=self._error.code if self._error is not None else self._unfinished(),
        )

    def _reasons(self) -> tuple[str, ...]:
        reasons = (result.finish_reason or result.kv for result in self._results)
        return tuple("handed_over" if reason == HANDOFF else reason for reason in reasons)

    def _decisions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(result.prefill for result in self._results if result.prefill))

    def _outcome(self, status: int) -> str:
        if self._error is not None:
            return self._error.code
        if left := self._unfinished():
            return left
        if status >= 400:
            return "refused"
        return ",".join(dict.fromkeys(self._reasons()))

    def _unfinished(self) -> str:
        """The outcome if a choice has not ended, and nothing has failed."""
        return "disconnected" if len(self._results) < len(self._rids) else ""

    def _tokens_and_times(self) -> dict[str, str | int | float]:
        usages = [result.usage for result in self._results]
        slowest = max((result.timing for result in self._results), key=lambda timing: timing.total_s)
        peers = dict.fromkeys(result.peer for result in self._results if result.peer)
        fields: dict[str, str | int | float] = {
            "prompt": sum(usage.prompt_tokens for usage in usages),
            "cached": sum(usage.cached_tokens for usage in usages),
            "generated": sum(usage.completion_tokens for usage in usages),
        }
        if self._first_token_s is not None:
            fields["ttft_s"] = round(self._first_token_s, 4)
        times = msgspec.structs.asdict(slowest)
        fields |= {name: round(value, 4) for name, value in times.items()}
        if peers:
            fields["peer"] = ",".join(peers)
        if decisions := self._decisions():
            fields["prefill"] = ",".join(decisions)
        return fields


class RequestLog:
    """Writes the request log. Refusals before a prompt was admitted are logged at a bounded rate, and counted. recent:
    keeps the last ones of what is logged."""

    def __init__(self, now: float, recent: RecentEvents | None = None) -> None:
        self._recent = recent
        self._refusals = TokenBucket(now, REFUSALS_PER_S, REFUSALS_AT_ONCE)
        self._unlogged = 0

    def write(self, record: RequestRecord, route: str, status: int, seconds: float, now: float) -> None:
        """Log a request that has ended, if it had a prompt or was refused."""
        if not record.has_prompt:
            if status < 400:
                return
            if self._refusals.exceeded(now):
                self._unlogged += 1
                return
        fields = record.fields(route, status, seconds)
        if self._unlogged and not record.has_prompt:
            fields["refusals_not_logged"] = self._unlogged
            self._unlogged = 0
        failed = max(status, record.error_status) >= 500
        if self._recent is not None:
            self._recent.ended(fields, record.has_prompt, failed, now)
        text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
        log.log(logging.WARNING if failed else logging.INFO, "request %s", text, extra={"fields": fields})


def _shown(value: str | float) -> str:
    """A value as logfmt has it: in quotes, with escapes, unless it is plain."""
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else json.dumps(value)  # ASCII alone: no control characters, no escapes
