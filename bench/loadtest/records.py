"""What became of each request of a stage, as columns, and the statistics of them. Pure: no clock, no socket.

Latency is counted from the time at which a request was meant to be sent. In an open loop a server that stalls delays
the client too; counted from the sending, the requests that it delayed would vanish from the tail ("coordinated
omission", Gil Tene). A closed loop has no such time: its figures are service times, and are named so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CONNECT: Final = -1
TIMEOUT: Final = -2
LOST: Final = -3
NO_ANSWER: Final = -4  # a 200 that holds less than any answer of the model does
KINDS: Final = {CONNECT: "connect", TIMEOUT: "timeout", LOST: "read", NO_ANSWER: "no answer in a 200"}

# Times in seconds from the start of the stage; milliseconds and tokens from Server-Timing, NaN and 0 without it.
RECORD: Final = np.dtype(
    [
        ("intended", "f8"),
        ("sent", "f8"),
        ("done", "f8"),
        ("status", "i4"),
        ("tokens", "i8"),
        ("queue_ms", "f8"),
        ("compute_ms", "f8"),
        ("window_tokens", "i8"),
    ]
)
Records = NDArray[Any]  # of RECORD


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles by nearest rank, and the largest, in milliseconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, seconds: NDArray[np.float64]) -> Latency:
        """Raises ValueError on none: a percentile of nothing is not a figure."""
        if not len(seconds):
            raise ValueError("percentiles need at least one answered request")
        values = np.quantile(seconds * 1e3, (0.5, 0.9, 0.99, 0.999, 1.0), method="inverted_cdf")
        return cls(*(float(value) for value in values))


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows that a stage's requests ran in, from Server-Timing; each counts once, however many shared it."""

    tokens: float  # mean
    compute_ms: float  # median
    queue_ms: float  # median over requests


@dataclass(frozen=True, slots=True)
class Summary:
    """One stage without its warm-up. `open_loop` says what `latency` is counted from."""

    open_loop: bool
    seconds: float
    requests: int  # answered 200, of those meant to be sent in the measured time
    requests_per_s: float  # answered in the measured time
    tokens_per_s: float
    offered_per_s: float  # meant to be sent
    latency: Latency | None  # None: nothing was answered
    send_delay_p99_ms: float  # sent later than meant: the client's own lateness
    errors: dict[str, int]
    windows: Windows | None  # None: the server gives no Server-Timing


def summarize(records: Records, warm_up: float, end: float, *, open_loop: bool) -> Summary:
    """Statistics of [warm_up, end), seconds from the start.

    Rates count what was answered in that time, so that a backlog answered after it does not flatter the server;
    latencies count what was meant to be sent in it, however late it was answered.

    Raises:
        ValueError: the measured time is empty.
    """
    if end <= warm_up:
        raise ValueError(f"a stage of {end:g} s is all warm-up ({warm_up:g} s)")
    measured = records[(records["intended"] >= warm_up) & (records["intended"] < end)]
    within = records[(records["done"] >= warm_up) & (records["done"] < end) & (records["status"] == 200)]
    answered = measured[measured["status"] == 200]
    failed = Counter(KINDS.get(status, f"status {status}") for status in measured["status"].tolist() if status != 200)
    delays = measured["sent"] - measured["intended"]
    seconds = end - warm_up
    return Summary(
        open_loop=open_loop,
        seconds=seconds,
        requests=len(answered),
        requests_per_s=len(within) / seconds,
        tokens_per_s=float(within["tokens"].sum()) / seconds,
        offered_per_s=len(measured) / seconds,
        latency=Latency.of(answered["done"] - answered["intended"]) if len(answered) else None,
        send_delay_p99_ms=float(np.quantile(delays, 0.99)) * 1e3 if len(delays) else 0.0,
        errors=dict(failed),
        windows=windows_of(answered),
    )


def windows_of(answered: Records) -> Windows | None:
    """The windows behind requests that were answered; None where no request says its window.

    A request of t tokens in a window of w is t / w of a window, so the parts of a window add up to one.
    """
    timed = answered[answered["window_tokens"] > 0]
    if not len(timed):
        return None
    parts = np.minimum(1.0, timed["tokens"] / timed["window_tokens"])
    return Windows(
        tokens=float(timed["tokens"].sum() / parts.sum()),
        compute_ms=weighted_median(timed["compute_ms"], parts),
        queue_ms=float(np.median(timed["queue_ms"])),
    )


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """The smallest of `values` at which half of the weight is reached."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def joined(parts: Sequence[Records]) -> Records:
    """The records of several processes, by the time at which they were meant to be sent."""
    records = np.concatenate(parts) if parts else np.empty(0, RECORD)
    return records[np.argsort(records["intended"], kind="stable")]
