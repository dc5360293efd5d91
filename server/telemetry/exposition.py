"""The text of /metrics: Prometheus' text format 0.0.4, written in a pass over the values.

prometheus_client takes ten times as long for it, on the event loop that answers clients: tests compare the two.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString

from headrace.core.stats import HistogramSample, MetricSpec, Stats

PREFIX = "headrace_"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})

Labels = tuple[str, ...]


def render(stats: Iterable[Stats], catalog: Iterable[MetricSpec], prefix: str = PREFIX) -> bytes:
    """The text of /metrics. prefix: of all names. Metrics of the catalog that have no value appear with zero; metrics
    that are not in the catalog appear with numbered labels. Values with the same name and labels are added up."""
    values: dict[str, dict[Labels, float]] = {}
    histograms: dict[str, dict[Labels, HistogramSample]] = {}
    for part in stats:
        for sample in part.samples:
            found = values.setdefault(sample.name, {})
            found[sample.labels] = found.get(sample.labels, 0.0) + sample.value
        for histogram in part.histograms:
            others = histograms.setdefault(histogram.name, {})
            others[histogram.labels] = _added(others.get(histogram.labels), histogram)
    specs = {spec.name: spec for spec in catalog}
    for name in (*values, *histograms):
        if name not in specs:
            labels = next(iter({**values.get(name, {}), **histograms.get(name, {})}))
            specs[name] = _guess(name, labels, name in histograms)
    lines: list[str] = []
    for name, spec in specs.items():
        full = f"{prefix}{name}"
        lines.append(f"# HELP {full} {spec.help.translate(_HELP_ESCAPES)}\n# TYPE {full} {spec.kind}\n")
        if spec.kind == "histogram":
            lines.extend(_histogram_lines(full, spec, histograms.get(name, {})))
        else:
            lines.extend(_plain_lines(full, spec, values.get(name, {})))
    return "".join(lines).encode()


def _guess(name: str, labels: Labels, histogram: bool) -> MetricSpec:
    """A description of a metric that is not in the catalog."""
    names = tuple(f"label{index}" for index in range(len(labels)))
    kind: Literal["counter", "gauge", "histogram"] = (
        "histogram" if histogram else "counter" if name.endswith("_total") else "gauge"
    )
    return MetricSpec(name, kind, f"{name.replace('_', ' ')}.", names)


def _plain_lines(full: str, spec: MetricSpec, values: dict[Labels, float]) -> Iterator[str]:
    order = _order(spec.labels)
    for labels, value in (dict.fromkeys(_zeros(spec), 0.0) | values).items():
        braces = f"{{{','.join(_pairs(spec.labels, labels, order))}}}" if labels else ""
        yield f"{full}{braces} {_number(value)}\n"


def _histogram_lines(full: str, spec: MetricSpec, found: dict[Labels, HistogramSample]) -> Iterator[str]:
    order = _order(spec.labels)
    empty = HistogramSample(spec.name, spec.bounds, (0,) * (len(spec.bounds) + 1), 0.0)
    for labels, histogram in (dict.fromkeys(_zeros(spec), empty) | found).items():
        pairs = _pairs(spec.labels, labels, order)
        total = 0
        for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
            total += count
            le = f'le="{"+Inf" if bound == float("inf") else f"{bound:g}"}"'
            yield f"{full}_bucket{{{','.join(sorted([*pairs, le]))}}} {_number(total)}\n"
        braces = f"{{{','.join(pairs)}}}" if pairs else ""
        yield f"{full}_count{braces} {_number(total)}\n"
        yield f"{full}_sum{braces} {_number(histogram.sum)}\n"


def _order(names: Sequence[str]) -> list[int]:
    """Positions of labels, by their names: lines have them sorted."""
    return sorted(range(len(names)), key=names.__getitem__)


def _pairs(names: Sequence[str], labels: Labels, order: Sequence[int]) -> list[str]:
    return [f'{names[index]}="{labels[index].translate(_ESCAPES)}"' for index in order]


def _number(value: float) -> str:
    return "0.0" if value == 0 else str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _zeros(spec: MetricSpec) -> tuple[Labels, ...]:
    return spec.zeros or (() if spec.labels else ((),))


def _added(first: HistogramSample | None, second: HistogramSample) -> HistogramSample:
    """The sum of two histograms with the same bounds; with other bounds, the second one."""
    if first is None or first.bounds != second.bounds:
        return second
    counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
    return HistogramSample(second.name, second.bounds, counts, first.sum + second.sum, second.labels)
