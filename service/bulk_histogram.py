"""A Prometheus histogram that is raised for a whole window at once; one observation of the client library's costs 2 us,
which every request would pay. It knows no window and no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Counts:
    """The observations under one label. Raised by one thread."""

    __slots__ = ("_bounds", "buckets", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)  # each alone; the last has no upper bound
        self.total = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Count all of `values`, none of which is NaN."""
        bounds, buckets = self._bounds, self.buckets
        for value in values:
            buckets[bisect_left(bounds, value)] += 1
        self.total += sum(values)


class BulkHistogram(Collector):
    """One histogram with one label; `bounds` are its buckets' upper ones, rising."""

    def __init__(self, name: str, documentation: str, label: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._label = label
        self._bounds = tuple(bounds)
        self._labels: dict[str, Counts] = {}

    def labels(self, value: str) -> Counts:
        """The counts under `value`, made when first asked for."""
        return self._labels.setdefault(value, Counts(self._bounds))

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """What it is called, for the registry to see that nothing else is."""
        return [self._family()]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """As the client library's own histogram is exposed, but for the time of its creation."""
        family = self._family()
        for value, counts in list(self._labels.items()):
            buckets, below = [], 0
            for bound, count in zip((*map(repr, self._bounds), "+Inf"), counts.buckets, strict=True):
                below += count
                buckets.append((bound, float(below)))
            family.add_metric([value], buckets, counts.total)
        yield family

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
