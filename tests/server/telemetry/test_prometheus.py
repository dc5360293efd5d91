"""/metrics: all metrics of the catalog appear from the start, all values appear."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.stats import Counters, Histograms, MetricSpec, Sample, Stats
from headrace.server.telemetry.catalog import CATALOG
from headrace.server.telemetry.prometheus import FrontMetrics, render


def families(*stats: Stats) -> dict[str, object]:
    return {family.name: family for family in text_string_to_metric_families(render(stats).decode())}


def samples(*stats: Stats) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(render(stats).decode())
        for sample in family.samples
    }


def test_the_whole_catalog_appears_without_values() -> None:
    text = render([Stats()]).decode()
    for spec in CATALOG:
        assert f"# HELP headrace_{spec.name} {spec.help}" in text, spec.name
        assert f"# TYPE headrace_{spec.name} {spec.kind}" in text, spec.name
    values = samples(Stats())
    for spec in CATALOG:
        if spec.kind != "histogram" and (spec.zeros or not spec.labels):
            for labels in spec.zeros or ((),):
                by_name = sorted(zip(spec.labels, labels, strict=True))  # the order in the text
                assert values["headrace_" + spec.name, tuple(value for _, value in by_name)] == 0


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


@given(st.lists(st.floats(0, 400, allow_nan=False), max_size=30))
def test_histograms_count_like_brute_force(durations: list[float]) -> None:
    spec = MetricSpec("http_request_duration_seconds", "histogram", "x", ("route",))
    metrics = FrontMetrics()
    for duration in durations:
        metrics.observe_request("/x", 200, duration)
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(render([metrics.statistics()]).decode()):
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
