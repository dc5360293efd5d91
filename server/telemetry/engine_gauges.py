"""The gauges that routers choose a server by: llm-d's endpoint picker reads one series for each. Under Headrace's names
in every /metrics, under vLLM's with --metrics-names vllm. Pure."""

from collections.abc import Iterable

import msgspec

from headrace.core.stats import MetricSpec, Sample, Stats
from headrace.server.telemetry.exposition import render

WAITING = ("bootstrap", "waiting", "fetching")
RUNNING = ("running", "generating")
ENGINE_GAUGES: tuple[MetricSpec, ...] = (
    MetricSpec("requests_running", "gauge", "Requests that are being computed or decoded."),
    MetricSpec(
        "requests_waiting", "gauge", "Requests that wait to be computed, for a peer, or for KV of a prefill server."
    ),
    MetricSpec("kv_usage", "gauge", "Share of the KV pages that requests have, from 0 to 1; cached ones are free."),
    MetricSpec("kv_info", "gauge", "Always 1; tokens of a KV page, and KV pages.", ("page_size", "pages")),
)
_OF_ENGINE = ("engine", "model_name")
_VLLM = "vllm:"
_VLLM_CATALOG: tuple[MetricSpec, ...] = (  # in the order of ENGINE_GAUGES
    MetricSpec("num_requests_running", "gauge", "Number of requests in batches.", _OF_ENGINE),
    MetricSpec("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", _OF_ENGINE),
    MetricSpec("kv_cache_usage_perc", "gauge", "KV cache usage. 1 means 100 percent usage.", _OF_ENGINE),
    MetricSpec("cache_config_info", "gauge", "The KV cache.", (*_OF_ENGINE, "block_size", "num_gpu_blocks")),
)


class EngineGauges(msgspec.Struct, frozen=True):
    """What the scheduler has to do, and its KV pages."""

    running: float
    waiting: float
    leased_pages: float
    pages: float

    @property
    def usage(self) -> float:
        """Share of the pages that requests have."""
        return self.leased_pages / self.pages if self.pages else 0.0

    def samples(self, page_size: int) -> tuple[Sample, ...]:
        """Under Headrace's names. The pages are not told before the scheduler has told them."""
        pages = (str(page_size), str(int(self.pages)))
        info = (Sample("kv_info", 1.0, pages),) if self.pages else ()
        return (
            Sample("requests_running", self.running),
            Sample("requests_waiting", self.waiting),
            Sample("kv_usage", self.usage),
            *info,
        )

    def as_vllm(self, page_size: int, model_name: str) -> bytes:
        """The text of them under vLLM's names. All replicas are one engine, 0."""
        named = zip(_VLLM_CATALOG, self.samples(page_size), strict=False)
        samples = tuple(Sample(spec.name, own.value, ("0", model_name, *own.labels)) for spec, own in named)
        return render([Stats(samples)], _VLLM_CATALOG, prefix=_VLLM)


def engine_gauges(stats: Iterable[Stats]) -> EngineGauges:
    """From the scheduler's samples, of all replicas together."""
    phases: dict[str, float] = {}
    pages: dict[str, float] = {}
    for part in stats:
        for sample in part.samples:
            counts = {"queue_requests": phases, "kv_pages": pages}.get(sample.name)
            if counts is not None:
                counts[sample.labels[0]] = counts.get(sample.labels[0], 0.0) + sample.value
    return EngineGauges(
        running=sum(phases.get(phase, 0.0) for phase in RUNNING),
        waiting=sum(phases.get(phase, 0.0) for phase in WAITING),
        leased_pages=pages.get("leased", 0.0),
        pages=sum(pages.values()),
    )
