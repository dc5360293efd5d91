"""Counters, gauges and histograms as plain values that can be sent; the front end renders them for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
LABELS = 1000
TOKENS = (1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)


class MetricSpec(msgspec.Struct, frozen=True):
    """What a catalog says of one metric. name: as in its samples (no prefix; counters end in _total).

    labels: label names, in the order in which samples give their values. zeros: label values that are shown
    with zero before anything was counted. bounds: of a histogram that has no observation yet.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    zeros: tuple[tuple[str, ...], ...] = ()
    bounds: tuple[float, ...] = SECONDS


class Sample(msgspec.Struct, frozen=True):
    """One value of a counter or gauge under its label values, in the order the metric declares its labels."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


class HistogramSample(msgspec.Struct, frozen=True):
    """counts[i] observations were at most bounds[i] and above bounds[i-1]; the last count is for the rest."""

    name: str
    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    labels: tuple[str, ...] = ()


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of one process, or of several joined."""

    samples: tuple[Sample, ...] = ()
    histograms: tuple[HistogramSample, ...] = ()


def join(parts: Iterable[Stats]) -> Stats:
    """One snapshot of several."""
    parts = tuple(parts)
    return Stats(
        samples=tuple(sample for part in parts for sample in part.samples),
        histograms=tuple(histogram for part in parts for histogram in part.histograms),
    )


class Counters:
    """Monotonic counts by (name, labels). Not thread-safe: owned by one thread, read through snapshot(). A label may be
    a peer's word; beyond LABELS of them under one name, new ones count as "other"."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._labels: dict[str, int] = {}

    def add(self, name: str, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        key = (name, labels)
        if key not in self._values:
            known = self._labels.get(name, 0)
            if known >= LABELS:
                key = (name, ("other",) * len(labels))
            self._labels[name] = known + (key not in self._values)
        self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, name: str, labels: tuple[str, ...] = ()) -> float:
        return self._values.get((name, labels), 0.0)

    def snapshot(self) -> tuple[Sample, ...]:
        return tuple(Sample(name, value, labels) for (name, labels), value in self._values.items())


class Histograms:
    """Histograms by (name, labels) with fixed upper bounds, in base units."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}

    def observe(
        self, name: str, value: float, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS
    ) -> None:
        key = (name, labels)
        if key not in self._counts:
            self._bounds[key] = bounds
            self._counts[key] = [0] * (len(bounds) + 1)
            self._sums[key] = 0.0
        self._counts[key][bisect_left(self._bounds[key], value)] += 1
        self._sums[key] += value

    def snapshot(self) -> tuple[HistogramSample, ...]:
        return tuple(
            HistogramSample(name, self._bounds[key], tuple(counts), self._sums[key], labels)
            for key, counts in self._counts.items()
            for name, labels in [key]
        )
