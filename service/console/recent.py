"""The last minutes as rates: what the service counts anyway, read every few seconds. Raises no count of its own, and
knows neither windows nor who looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.metrics import SECONDS, Metrics
from service.model import Model
from service.statistics import ModelStatistics

_FIELDS: Final = ("requests", "tokens", "total_ns", "queue_ns", "compute_ns", "windows", "failed")


@dataclass(frozen=True, slots=True)
class Counts:
    """All counts at one moment; `at` is `time.perf_counter()` seconds."""

    at: float
    # By identity, which the object itself guards: a model that is loaded anew begins at zero.
    models: dict[int, tuple[ModelStatistics, tuple[int, ...]]]
    queue: list[int]  # requests by how long they queued, as the metric's buckets
    rejections: dict[str, int]  # by reason


def read(at: float, models: Iterable[Model], metrics: Metrics) -> Counts:
    """What is counted now, of the models that are served."""
    served = list(models)
    queue = [0] * (len(SECONDS) + 1)
    for label in {model.label for model in served}:
        queue = [a + b for a, b in zip(queue, metrics.queue.labels(label).buckets, strict=True)]
    rejections = {
        sample.labels["reason"]: int(sample.value)
        for metric in metrics.rejections.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return Counts(at, {id(m.statistics): (m.statistics, _of(m.statistics)) for m in served}, queue, rejections)


def between(before: Counts, after: Counts, time_s: float, queue_tokens: int) -> dict[str, Any]:
    """What happened from one moment to a later one, as the page shows it: rates a second, means in milliseconds.

    Means are None where nothing was answered. `time_s` (Unix) and `queue_tokens` are those of `after`.
    """
    seconds = after.at - before.at
    total = dict.fromkeys(_FIELDS, 0)
    for key, (_, now) in after.models.items():
        then = before.models[key][1] if key in before.models else (0,) * len(_FIELDS)
        for name, a, b in zip(_FIELDS, then, now, strict=True):
            total[name] += b - a
    requests = total["requests"]
    # Those of a model that is no longer served vanish from the sum: fewer than before is none.
    queued = [max(0, b - a) for a, b in zip(before.queue, after.queue, strict=True)]
    p99 = quantile(queued, SECONDS, 0.99)
    rejections = {reason: n - before.rejections.get(reason, 0) for reason, n in after.rejections.items()}
    return {
        "time": time_s,
        "seconds": seconds,
        "requests": requests / seconds,
        "tokens": total["tokens"] / seconds,
        "windows": total["windows"] / seconds,
        "failed": total["failed"],
        "latency_ms": total["total_ns"] / requests / 1e6 if requests else None,
        "queue_ms": total["queue_ns"] / requests / 1e6 if requests else None,
        "compute_ms": total["compute_ns"] / requests / 1e6 if requests else None,
        "queue_p99_ms": None if p99 is None else p99 * 1e3,
        "queue_tokens": queue_tokens,
        "rejections": {reason: n for reason, n in rejections.items() if n},
    }


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """The `share` quantile of observations in buckets, linear within one, as Prometheus' `histogram_quantile` has it.

    `counts` has one bucket more than `bounds`, which has no upper bound: what lies there is said to be the last bound.
    None where nothing was observed.
    """
    rank, below, lower = share * sum(counts), 0, 0.0
    if not rank:
        return None
    for count, upper in zip(counts, bounds, strict=False):
        if below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return bounds[-1]


def _of(counted: ModelStatistics) -> tuple[int, ...]:
    return (
        counted.success.count,
        counted.tokens,
        counted.success.ns,
        counted.queue.ns,
        counted.compute_input.ns + counted.compute_infer.ns,
        counted.windows,
        counted.fail.count,
    )
