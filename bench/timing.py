"""What was measured, as numbers, and the arithmetic on it. Pure: no clock, no process, no socket."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Load:
    """What a load generator saw: requests answered 2xx in `seconds`; errors by kind."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    errors: dict[str, int] = field(default_factory=dict)
    tokens: float = 0.0  # of the requests that were answered

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError on no values: a figure without a round is not a figure."""
        if not values:
            raise ValueError("a spread needs at least one round")
        return cls(statistics.median(values), min(values), max(values))


def share_of_limit(service: float, before: float, after: float) -> float:
    """Service tokens/s over the in-process limit, the mean of what was measured before and after it."""
    if min(before, after) <= 0:
        raise ValueError(f"in-process limits must be positive, found {before} and {after}")
    return service / ((before + after) / 2)


def percentile(values: Sequence[float], q: float) -> float:
    """The smallest of `values` that at least the share `q` (0..1] of them does not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    # Rounded first: 0.07 * 100 is 7.000000000000001 in binary, and its ceiling would be one rank too far.
    rank = math.ceil(round(q * len(ordered), 9))
    return ordered[max(0, rank - 1)]
