"""Statistics line: tokens a second, ends of requests, queues and KV pages, every 10 s while there is work."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from headrace.core.runtime.clock import Clock
from headrace.core.stats import Stats
from headrace.scheduler.telemetry.metrics import QUEUES

log = logging.getLogger(__name__)

PERIOD_S = 10.0
MIB = 1 << 20

Values = dict[str, float]  # by name, and by name{label} for samples with labels


class StatisticsLog:
    """Writes one line a period in which tokens were computed, or requests were open or ended.

    snapshot: the current metrics of the server.
    """

    def __init__(self, snapshot: Callable[[], Awaitable[list[Stats]]], clock: Clock) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._before: Values = {}  # counters begin at 0
        self._then = clock.now()

    async def run(self) -> None:
        """Write lines until cancelled. May be run again after a failure."""
        while True:
            await asyncio.sleep(PERIOD_S)
            after, now = values(await self._snapshot()), self._clock.now()
            if fields := summary(self._before, after, now - self._then):
                text = " ".join(f"{name}={value}" for name, value in fields.items())
                log.info("statistics %s", text, extra={"fields": fields})
            self._before, self._then = after, now


def values(parts: Iterable[Stats]) -> Values:
    """All samples, and the sum over the labels of each name."""
    found: Values = {}
    for part in parts:
        for sample in part.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
            if sample.labels:
                labelled = f"{sample.name}{{{sample.labels[0]}}}"
                found[labelled] = found.get(labelled, 0.0) + sample.value
    return found


def summary(before: Values, after: Values, seconds: float) -> dict[str, int | float]:
    """What is logged of a period, by name; nothing if the server had no work. KV pages are shares of the pool; rates
    are per second; phases without requests are left out."""

    def grown(name: str) -> float:
        return max(0.0, after.get(name, 0.0) - before.get(name, 0.0))  # a scheduler that started again counts from 0

    prompt, generated = grown("prompt_tokens_total"), grown("generated_tokens_total")
    ended = {outcome: int(grown(f"requests_total{{{outcome}}}")) for outcome in ("finished", "failed")}
    if not (prompt or generated or any(ended.values()) or after.get("open_requests")):
        return {}
    seconds = max(seconds, 1e-3)
    pages = after.get("kv_pages", 0.0)
    phases = {phase.value: int(after.get(f"queue_requests{{{phase.value}}}", 0)) for phase in QUEUES}
    return {
        "seconds": round(seconds, 1),
        "prompt_tokens_per_s": round(prompt / seconds, 1),
        "cached": round(grown("cached_tokens_total") / prompt, 3) if prompt else 0.0,
        "generated_tokens_per_s": round(generated / seconds, 1),
        **ended,
        **{phase: requests for phase, requests in phases.items() if requests},
        "kv_leased": round(after.get("kv_pages{leased}", 0.0) / pages, 3) if pages else 0.0,
        "kv_cached": round(after.get("kv_pages{cached}", 0.0) / pages, 3) if pages else 0.0,
        "sent_mib_per_s": round(grown("bytes_sent_total") / MIB / seconds, 2),
        "received_mib_per_s": round(grown("bytes_received_total") / MIB / seconds, 2),
    }
