"""What the scheduler measures: counters, durations, the speed of plans, and a trace on demand."""

from headrace.core.stats import Counters, Histograms
from headrace.core.types.errors import ErrorInfo
from headrace.core.types.requests.outcomes import end_of
from headrace.scheduler.requests.phase import Phase
from headrace.scheduler.requests.record import Request
from headrace.scheduler.telemetry.metrics import ANONYMOUS, ERRORS, SALTED
from headrace.scheduler.telemetry.plan_log import PlanLog
from headrace.scheduler.telemetry.trace_log import TraceLog

RATE_SMOOTHING = 0.2  # weight of the newest plan in the throughput estimate
MAX_TENANTS = 64  # labels of a counter by tenant; those that come later are "other" together


class PlanRate:
    """Tokens per second, smoothed over recent plans."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a plan of so many tokens that took so many seconds."""
        if tokens <= 0 or seconds <= 0:
            return
        newest = tokens / seconds
        self._rate = newest if self._rate is None else self._rate + RATE_SMOOTHING * (newest - self._rate)

    def seconds_for(self, tokens: int) -> float:
        """How long so many tokens will take; one second while nothing is known."""
        return 1.0 if self._rate is None else tokens / self._rate


class Measurements:
    """Everything that is only measured, and decides nothing but retry times. metrics.py says what each name means."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.histograms = Histograms()
        self.rate = PlanRate()
        self.trace: TraceLog | None = None
        """The recording that is under way."""

        self.plans: PlanLog | None = None
        """Recent plans, while GET /status is asked for them."""

    def phase_left(self, request: Request, left: Phase, since: float, now: float, peer: str) -> None:
        """A request has gone from a phase, which it entered at `since`, to the phase that it has now. peer: name of
        the server at the other end of its transfer, "" if there is none."""
        if not request.open:
            self.histograms.observe("phase_duration_seconds", now - since, (left.value,))
        if self.trace is not None:
            self.trace.phase(request, left, since, now, peer)

    def hint(self, action: str, tokens: int) -> None:
        """A KV hint was granted for so many tokens."""
        self.counters.add("kv_hints_total", labels=(action, "granted" if tokens else "refused"))

    def first_token(self, request: Request, now: float) -> None:
        """A request's first token was computed: compare the time with what was predicted at its arrival."""
        if request.predicted_ttft_s is not None and (actual := now - request.arrived) > 0:
            error = (request.predicted_ttft_s - actual) / actual
            self.histograms.observe("ttft_prediction_error", error, bounds=ERRORS)

    def computed(self, rank: int, duration_s: float, now: float, tokens: int, decode_rows: int) -> None:
        """A rank has computed a plan."""
        if self.plans is None:
            return
        if self.plans.watched(now):
            self.plans.add(rank, duration_s, now, tokens, decode_rows)
        else:
            self.plans = None

    def served(self, request: Request, seconds: float) -> None:
        """Predicted seconds of a request's prefill are in a plan."""
        tenant = request.terms.tenant or (SALTED if request.terms.cache_salt else ANONYMOUS)
        self.counters.add("tenant_seconds_total", seconds, (tenant,), MAX_TENANTS)

    def failed(self, phase: str, error: ErrorInfo) -> None:
        """A request has failed in a phase, or was refused at admission."""
        self.counters.add("request_failures_total", labels=(phase, end_of(error).reason))
