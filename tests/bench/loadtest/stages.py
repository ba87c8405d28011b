"""Records and measured stages made by hand."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bench.loadtest.records import RECORD, Latency, Records, Summary, Windows
from bench.loadtest.stage import Measured


def records(rows: Iterable[tuple[float, ...]]) -> Records:
    """Rows of (intended, sent, done) and, from Server-Timing, perhaps (tokens, compute_ms, window_tokens)."""
    whole = [(*row[:3], 200, int((*row, 1)[3]), 0.0, *(row[4:6] or (np.nan, 0))) for row in rows]
    return np.array(whole, RECORD)


def measured(
    rate: float = 100.0,
    p50: float = 5.0,
    p99: float = 10.0,
    *,
    compute: float = 4.0,
    errors: dict[str, int] | None = None,
) -> Measured:
    """A stage with these figures and 16 tokens a request."""
    latency = Latency(p50, p50, p99, p99, p99)
    windows = Windows(32.0, compute, 0.5)
    return Measured(Summary(True, 1.0, 100, rate, 16 * rate, rate, latency, 0.1, errors or {}, windows), (), 0.2)
