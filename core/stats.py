"""Counters, gauges and histograms as plain values that processes send; the front end renders them for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MAX_LABELS = 1000  # label values of one counter
TOKENS = (1.0, 8.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)


class MetricSpec(msgspec.Struct, frozen=True):
    """Declaration of one metric in a catalog."""

    name: str
    """The name, as in its samples: without the prefix; counters end in _total."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Label names, in the order of the label values of samples."""
    zeros: tuple[tuple[str, ...], ...] = ()
    """Label values that are exported with 0 before anything was counted."""
    bounds: tuple[float, ...] = SECONDS
    """Bucket bounds of a histogram without observations."""


class Sample(msgspec.Struct, frozen=True):
    """One value of a counter or gauge."""

    name: str
    value: float
    labels: tuple[str, ...] = ()
    """Label values, in the order in which the MetricSpec declares the labels."""


class HistogramSample(msgspec.Struct, frozen=True):
    """One histogram."""

    name: str
    bounds: tuple[float, ...]
    """Upper bounds of the buckets, inclusive, ascending."""
    counts: tuple[int, ...]
    """Observations in each bucket, not cumulative; the last count is of those above all bounds."""
    sum: float
    """Sum of all observations."""
    labels: tuple[str, ...] = ()
    """Label values, in the order in which the MetricSpec declares the labels."""


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of the metrics of one process, or of several."""

    samples: tuple[Sample, ...] = ()
    histograms: tuple[HistogramSample, ...] = ()


def join(parts: Iterable[Stats]) -> Stats:
    """Concatenate snapshots."""
    parts = tuple(parts)
    return Stats(
        samples=tuple(sample for part in parts for sample in part.samples),
        histograms=tuple(histogram for part in parts for histogram in part.histograms),
    )


class Counters:
    """Monotonic counters by (name, labels). Not thread-safe.

    Label values may come from peers: beyond MAX_LABELS of one name, new ones are counted as "other".
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._labels: dict[str, int] = {}

    def add(self, name: str, amount: float = 1.0, labels: tuple[str, ...] = (), max_labels: int = MAX_LABELS) -> None:
        """Increase a counter. max_labels: of its label values, beyond which new ones are counted as "other"."""
        key = (name, labels)
        if key not in self._values:
            known = self._labels.get(name, 0)
            if known >= max_labels:
                key = (name, ("other",) * len(labels))
            self._labels[name] = known + (key not in self._values)
        self._values[key] = self._values.get(key, 0.0) + amount

    def value(self, name: str, labels: tuple[str, ...] = ()) -> float:
        """Current value of a counter; 0 if nothing was counted."""
        return self._values.get((name, labels), 0.0)

    def snapshot(self) -> tuple[Sample, ...]:
        """All counters."""
        return tuple(Sample(name, value, labels) for (name, labels), value in self._values.items())


class Histograms:
    """Histograms by (name, labels) with fixed upper bounds, in base units."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, tuple[str, ...]], tuple[float, ...]] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self._sums: dict[tuple[str, tuple[str, ...]], float] = {}

    def observe(
        self, name: str, value: float, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = SECONDS, times: int = 1
    ) -> None:
        """Add an observation, so many times. bounds: taken from the first observation of each (name, labels)."""
        key = (name, labels)
        if key not in self._counts:
            self._bounds[key] = bounds
            self._counts[key] = [0] * (len(bounds) + 1)
            self._sums[key] = 0.0
        self._counts[key][bisect_left(self._bounds[key], value)] += times
        self._sums[key] += value * times

    def snapshot(self) -> tuple[HistogramSample, ...]:
        """All histograms."""
        return tuple(
            HistogramSample(name, self._bounds[key], tuple(counts), self._sums[key], labels)
            for key, counts in self._counts.items()
            for name, labels in [key]
        )
