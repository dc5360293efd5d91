"""One snapshot of all metrics of a server."""

from collections.abc import Iterator, Sequence

from headrace.core.stats import Sample, Stats
from headrace.core.types.ranks.expert_load import ExpertLoad, imbalance, total_rows
from headrace.server.frontend.link.scheduler_client import SchedulerClient
from headrace.server.frontend.status.readiness import Readiness
from headrace.server.telemetry.engine_gauges import engine_gauges
from headrace.server.telemetry.prometheus import FrontMetrics

STATS_TIMEOUT_S = 1.0


class StatsCollector:
    """Joins the counters of the scheduler process, which include those of the stages, with the front end's."""

    def __init__(self, client: SchedulerClient, readiness: Readiness, metrics: FrontMetrics, page_size: int) -> None:
        self._client = client
        self._readiness = readiness
        self._metrics = metrics
        self._page_size = page_size

    async def snapshot(self) -> list[Stats]:
        """Current metrics; of a scheduler that is slow to answer, those of its last answer."""
        scheduler = await self._client.query_stats(STATS_TIMEOUT_S) if self._client.problem() is None else Stats()
        ready = Sample("ready", float(self._readiness.not_ready() is None))
        engine = engine_gauges([scheduler]).samples(self._page_size)
        open_requests = Sample("open_requests", self._client.open_calls)
        own = Stats((ready, open_requests, *engine, *_imbalances(self._client.experts)))
        return [scheduler, self._metrics.statistics(), own]

    async def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """Rows per expert, of every rank that has experts; those of the scheduler's last answer if it is slow."""
        if self._client.problem() is None:
            await self._client.query_stats(STATS_TIMEOUT_S)
        return self._client.experts


def _imbalances(loads: Sequence[ExpertLoad]) -> Iterator[Sample]:
    """The load ratio of each stage that has experts, over all its ranks."""
    for stage in sorted({load.stage for load in loads}):
        layers = total_rows(load for load in loads if load.stage == stage)
        yield Sample("expert_imbalance", imbalance(layers.values()), (str(stage),))
