"""/metrics: all metrics of the catalog appear from the start, all values appear."""

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.stats import Counters, Histograms, MetricSpec, Sample, Stats
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.exposition import PREFIX, render
from headrace.server.telemetry.prometheus import FrontMetrics


def families(*stats: Stats) -> dict[str, object]:
    return {family.name: family for family in text_string_to_metric_families(render(stats, CATALOG).decode())}


def samples(*stats: Stats) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(stats, CATALOG).decode())
        for sample in family.samples
    }


def test_the_whole_catalog_appears_without_values() -> None:
    text = render([Stats()], CATALOG).decode()
    for spec in CATALOG:
        assert f"# HELP headrace_{spec.name} {spec.help}" in text, spec.name
        assert f"# TYPE headrace_{spec.name} {spec.kind}" in text, spec.name
    values = samples(Stats())
    for spec in CATALOG:
        if spec.kind != "histogram" and (spec.zeros or not spec.labels):
            for labels in spec.zeros or ((),):
                by_name = sorted(zip(spec.labels, labels, strict=True))  # the order in the text
                assert values["headrace_" + spec.name, tuple(value for _, value in by_name)] == 0


def by_client(stats: Stats) -> str:
    """The text as prometheus_client writes it, of counters, gauges and histograms with values."""

    class Collector:
        def describe(self) -> list[Metric]:
            return []

        def collect(self) -> Iterator[Metric]:
            specs = {spec.name: spec for spec in CATALOG}
            for name in dict.fromkeys(sample.name for sample in stats.samples):
                spec = specs[name]
                kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
                family = kind(PREFIX + name, spec.help, labels=spec.labels)
                for sample in stats.samples:
                    if sample.name == name:
                        family.add_metric(sample.labels, sample.value)
                yield family
            for histogram in stats.histograms:
                spec = specs[histogram.name]
                counted = HistogramMetricFamily(PREFIX + spec.name, spec.help, labels=spec.labels)
                totals = [sum(histogram.counts[: place + 1]) for place in range(len(histogram.counts))]
                bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
                counted.add_metric(histogram.labels, list(zip(bounds, totals, strict=True)), histogram.sum)
                yield counted

    registry = CollectorRegistry()
    registry.register(Collector())
    return generate_latest(registry).decode()


@given(st.text(max_size=20), st.floats(allow_nan=False) | st.integers(0, 1 << 60), st.lists(st.floats(0, 400)))
def test_the_text_is_that_of_prometheus_client(label: str, value: float, durations: list[float]) -> None:
    value += 0.0  # -0.0 is 0.0 here, as in the sums that are shown
    histograms = Histograms()
    for duration in durations:
        histograms.observe("http_request_duration_seconds", duration, (label,))
    samples = (
        Sample("kv_pages", value, ("free",)),
        Sample("requests_total", abs(value), ("failed", label, "/x")),
        Sample("stage_tier_bytes_total", abs(value), ("0", label, "load")),
    )
    stats = Stats(samples, histograms.snapshot())
    names = {sample.name for sample in (*stats.samples, *stats.histograms)}
    catalog = [spec for spec in CATALOG if spec.name in names]
    bare = [MetricSpec(spec.name, spec.kind, spec.help, spec.labels) for spec in catalog]
    assert sorted(render([stats], bare).decode().splitlines()) == sorted(by_client(stats).splitlines())


def test_values_of_several_processes_are_added_up() -> None:
    values = samples(Stats((Sample("chunks_sent_total", 3),)), Stats((Sample("chunks_sent_total", 4),)))
    assert values["headrace_chunks_sent_total", ()] == 7


def test_metrics_outside_the_catalog_appear_too() -> None:
    histograms = Histograms()
    histograms.observe("nap_seconds", 0.2, ("x",))
    values = samples(Stats((Sample("naps_total", 2, ("a", "b")), Sample("depth", 5)), histograms.snapshot()))
    assert values["headrace_naps_total", ("a", "b")] == 2
    assert values["headrace_depth", ()] == 5
    assert values["headrace_nap_seconds_count", ("x",)] == 1


@settings(max_examples=25)
@given(st.lists(st.floats(0, 400, allow_nan=False), max_size=30))
def test_histograms_count_like_brute_force(durations: list[float]) -> None:
    spec = MetricSpec("http_request_duration_seconds", "histogram", "x", ("route",))
    metrics = FrontMetrics()
    for duration in durations:
        metrics.observe_request("/x", 200, duration)
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(render([metrics.statistics()], CATALOG).decode()):
        if family.name == "headrace_http_request_duration_seconds":
            for sample in (one for one in family.samples if one.labels["route"] == "/x"):
                values[sample.labels.get("le", sample.name)] = sample.value
    if not durations:
        assert values == {}
        return
    for bound in spec.bounds:
        assert values[f"{bound:g}"] == sum(duration <= bound for duration in durations)
    assert values["+Inf"] == len(durations)


def test_labels_may_hold_anything() -> None:
    counters = Counters()
    counters.add("nacks_total", labels=('a "quoted"\nreason\\',))
    found = samples(Stats(counters.snapshot()))
    assert [value for (_, labels), value in found.items() if any("quoted" in label for label in labels)] == [1]
    assert families()
