"""Prometheus text of the metrics of all processes. Names get the prefix headrace_."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric

from headrace.core.process_usage import process_usage
from headrace.core.stats import TOKENS, Counters, Histograms, HistogramSample, MetricSpec, Sample, Stats
from headrace.core.types.outcomes import End
from headrace.core.types.request import Usage
from headrace.server.telemetry.catalog import CATALOG, E2E_SECONDS, TOKEN_SECONDS

PREFIX = "headrace_"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class FrontMetrics:
    """Counters and histograms of the front end. Used by the event loop only."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._histograms = Histograms()
        self._build: tuple[str, ...] = ("", "", "")
        self._sources: tuple[Callable[[], tuple[Sample, ...]], ...] = ()

    def include(self, *sources: Callable[[], tuple[Sample, ...]]) -> None:
        """Show the samples that these return, too."""
        self._sources += sources

    def set_build(self, version: str, role: str, model: str) -> None:
        """Set the labels of build_info."""
        self._build = (version, role, model)

    def observe_request(self, route: str, status: int, duration_s: float) -> None:
        """Count one HTTP request. route: template of its path, so that there are few label values."""
        self._counters.add("http_requests_total", labels=(route, str(status)))
        self._histograms.observe("http_request_duration_seconds", duration_s, (route,))

    def count_ends(self, route: str, ends: Iterable[End]) -> None:
        """Count the ends of the prompts and choices of one HTTP request."""
        for outcome, reason in ends:
            self._counters.add("requests_total", labels=(outcome, reason, route))

    def observe_end(self, duration_s: float, usage: Usage) -> None:
        """Count the time and the tokens of a request that ended well."""
        self._histograms.observe("e2e_request_latency_seconds", duration_s, bounds=E2E_SECONDS)
        self._histograms.observe("request_prompt_tokens", usage.prompt_tokens, bounds=TOKENS)
        self._histograms.observe("request_generation_tokens", usage.completion_tokens, bounds=TOKENS)

    def observe_tokens(self, duration_s: float, tokens: int) -> None:
        """Count the time from the tokens before to these, each token with its share."""
        self._histograms.observe("inter_token_latency_seconds", duration_s / tokens, bounds=TOKEN_SECONDS, times=tokens)

    def observe_mean_token_time(self, seconds: float) -> None:
        """Count a request's mean time per token after its first one."""
        self._histograms.observe("request_time_per_output_token_seconds", seconds, bounds=TOKEN_SECONDS)

    def observe_first_token(self, duration_s: float) -> None:
        """Count the time from a request's arrival to its first token."""
        self._histograms.observe("time_to_first_token_seconds", duration_s)

    def count_retry(self, reason: str) -> None:
        """Count a prompt that goes to another prefill server. reason: why it left the one before."""
        self._counters.add("prefill_retries_total", labels=(reason,))

    def count_retried_request(self, outcome: str) -> None:
        """Count the end of a request whose prompt went to more than one prefill server."""
        self._counters.add("prefill_retried_requests_total", labels=(outcome,))

    def statistics(self) -> Stats:
        """A snapshot."""
        build = Sample("build_info", 1.0, self._build)
        included = (sample for source in self._sources for sample in source())
        own = (build, *process_usage("front_end"))
        return Stats((*self._counters.snapshot(), *own, *included), self._histograms.snapshot())


def render(stats: Iterable[Stats], catalog: Iterable[MetricSpec] = CATALOG) -> bytes:
    """The text of /metrics. Metrics of the catalog that have no value appear with zero; metrics that are not in the
    catalog appear with numbered labels. Values with the same name and labels are added up."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(tuple(stats), tuple(catalog)))
    return generate_latest(registry)


class _Snapshot:
    """A prometheus_client collector over a snapshot."""

    def __init__(self, stats: tuple[Stats, ...], catalog: tuple[MetricSpec, ...]) -> None:
        self._specs = {spec.name: spec for spec in catalog}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], HistogramSample]] = {}
        for part in stats:
            for sample in part.samples:
                values = self._values.setdefault(sample.name, {})
                values[sample.labels] = values.get(sample.labels, 0.0) + sample.value
            for histogram in part.histograms:
                found = self._histograms.setdefault(histogram.name, {})
                found[histogram.labels] = _added(found.get(histogram.labels), histogram)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        unknown = [name for name in (*self._values, *self._histograms) if name not in self._specs]
        for spec in (*self._specs.values(), *map(self._guess, dict.fromkeys(unknown))):
            yield self._histogram(spec) if spec.kind == "histogram" else self._plain(spec)

    def _guess(self, name: str) -> MetricSpec:
        """A description of a metric that is not in the catalog."""
        labels = next(iter({**self._values.get(name, {}), **self._histograms.get(name, {})}))
        names = tuple(f"label{index}" for index in range(len(labels)))
        kind = "histogram" if name in self._histograms else "counter" if name.endswith("_total") else "gauge"
        return MetricSpec(name, kind, f"{name.replace('_', ' ')}.", names)  # type: ignore[arg-type]

    def _plain(self, spec: MetricSpec) -> Metric:
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = kind(PREFIX + spec.name, spec.help, labels=spec.labels)
        values = dict.fromkeys(_zeros(spec), 0.0) | self._values.get(spec.name, {})
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

    def _histogram(self, spec: MetricSpec) -> Metric:
        family = HistogramMetricFamily(PREFIX + spec.name, spec.help, labels=spec.labels)
        empty = {
            labels: HistogramSample(spec.name, spec.bounds, (0,) * (len(spec.bounds) + 1), 0.0, labels)
            for labels in _zeros(spec)
        }
        for labels, histogram in (empty | self._histograms.get(spec.name, {})).items():
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", total))
            family.add_metric(labels, buckets, histogram.sum)
        return family


def _zeros(spec: MetricSpec) -> tuple[tuple[str, ...], ...]:
    return spec.zeros or (() if spec.labels else ((),))


def _added(first: HistogramSample | None, second: HistogramSample) -> HistogramSample:
    """The sum of two histograms with the same bounds; with other bounds, the second one."""
    if first is None or first.bounds != second.bounds:
        return second
    counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
    return HistogramSample(second.name, second.bounds, counts, first.sum + second.sum, second.labels)
