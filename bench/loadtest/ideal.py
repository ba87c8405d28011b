"""The latency of an ideal server: no wire, no scheduling, an engine as fast as the same graph in-process, which takes
whatever waits the moment it is free. Below it no server gets; how far above a server is, is its own doing. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.loadtest.arrivals import arrivals

REQUESTS: Final = 100_000  # simulated; the p99 rests on a hundredth of them


@dataclass(frozen=True, slots=True)
class Ideal:
    """Milliseconds: the p99 of latency, and the median compute time of a window."""

    p99: float
    compute: float


@dataclass(frozen=True, slots=True)
class WindowCost:
    """Seconds of a window of so many requests, as measured; linear between, and on from the last two."""

    requests: Sequence[int]  # ascending, two at least
    seconds: Sequence[float]

    def of(self, count: int) -> float:
        """Of a window of `count` requests, at least 1."""
        if count <= self.requests[-1]:
            return float(np.interp(count, self.requests, self.seconds))
        (first, last), (began, ended) = self.requests[-2:], self.seconds[-2:]
        return ended + (count - last) * max(0.0, ended - began) / (last - first)


def ideal_latency(cost: WindowCost, rate: float, seed: int) -> Ideal:
    """Simulate Poisson arrivals of `rate` requests/s, for about REQUESTS of them.

    At a rate that even an ideal server cannot serve the queue grows to the end, and the figures with it.
    """
    times = arrivals("poisson", rate, REQUESTS / rate, seed)
    latencies, windows = np.empty_like(times), []
    at, free = 0, 0.0
    while at < len(times):
        start = max(free, times[at])
        stop = int(np.searchsorted(times, start, side="right"))
        windows.append(cost.of(stop - at))
        free = start + windows[-1]
        latencies[at:stop] = free - times[at:stop]
        at = stop
    return Ideal(float(np.quantile(latencies, 0.99)) * 1e3, float(np.median(windows)) * 1e3)
