"""A load test as one JSON document: what was measured, under what conditions, and the ratios that a baseline keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bench.loadtest.stage import Measured
from bench.loadtest.sweep import Limit, Measurement
from bench.loadtest.windows import Point, batching_gain, recommend
from bench.timing import Spread

Document = dict[str, Any]


COLUMNS: Final = (  # of a report: heading, field of Row, digits
    ("requests/s", "requests_per_s", 0),
    ("tokens/s", "tokens_per_s", 0),
    ("p50 ms", "p50_ms", 2),
    ("p90 ms", "p90_ms", 2),
    ("p99 ms", "p99_ms", 2),
    ("p99.9 ms", "p999_ms", 2),
    ("tokens/window", "window_tokens", 1),
    ("queue ms", "queue_ms", 2),
    ("compute ms", "compute_ms", 2),
    ("client CPU", "client_cpu", 2),
    ("errors", "errors", 0),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: medians over the rounds; None where the figure does not exist."""

    name: str
    loop: str
    value: float
    requests_per_s: float
    tokens_per_s: float
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    window_tokens: float | None
    queue_ms: float | None
    compute_ms: float | None
    send_delay_ms: float
    client_cpu: float
    errors: int
    saturated: tuple[str, ...]


def row(name: str, loop: str, value: float, rounds: Sequence[Measured]) -> Row:
    """The medians of `rounds`, at least one."""

    def median(read: Callable[[Measured], float | None]) -> float | None:
        found = [figure for figure in map(read, rounds) if figure is not None]
        return Spread.of(found).median if found else None

    def latency(name: str) -> float | None:
        return median(lambda m: None if m.summary.latency is None else getattr(m.summary.latency, name))

    def window(name: str) -> float | None:
        return median(lambda m: None if m.summary.windows is None else getattr(m.summary.windows, name))

    return Row(
        name=name,
        loop=loop,
        value=value,
        requests_per_s=Spread.of([m.summary.requests_per_s for m in rounds]).median,
        tokens_per_s=Spread.of([m.summary.tokens_per_s for m in rounds]).median,
        p50_ms=latency("p50"),
        p90_ms=latency("p90"),
        p99_ms=latency("p99"),
        p999_ms=latency("p999"),
        window_tokens=window("tokens"),
        queue_ms=window("queue_ms"),
        compute_ms=window("compute_ms"),
        send_delay_ms=Spread.of([m.summary.send_delay_p99_ms for m in rounds]).median,
        client_cpu=Spread.of([m.cpu_share for m in rounds]).median,
        errors=sum(sum(m.summary.errors.values()) for m in rounds),
        saturated=tuple(dict.fromkeys(reason for m in rounds for reason in m.saturated)),
    )


def document(
    plan: Mapping[str, Any],
    machine: Mapping[str, Any],
    measurements: Sequence[Measurement] = (),
    points: Sequence[Point] = (),
    limit: Limit | None = None,
) -> Document:
    """What `tokenslab bench load` and `windows` write, and what the report and the baseline read."""
    rows = [row(m.level.name, m.level.loop, m.level.value, m.rounds) for m in measurements]
    best = recommend(points) if points else None
    return {
        "schema_version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": dict(plan),
        "machine": dict(machine),
        "limit": None if limit is None else asdict(limit),
        "levels": [asdict(each) for each in rows],
        "windows": [
            {
                "max_window_tokens": point.max_window_tokens,
                "max_wait_ms": point.max_wait_ms,
                "closed": asdict(row("", "closed", 0, point.closed)),
                "open": asdict(row("", "open", 0, point.open_loop)),
            }
            for point in points
        ],
        "recommended": None
        if best is None
        else {
            "max_window_tokens": best.max_window_tokens,
            "max_wait_ms": best.max_wait_ms,
            "batching_gain": batching_gain(points),
        },
        "ratios": ratios(rows, limit),
        "rounds": [{"level": m.level.name, "rounds": [asdict(each) for each in m.rounds]} for m in measurements],
    }


def ratios(rows: Sequence[Row], limit: Limit | None) -> dict[str, float]:
    """What two machines may be compared by: throughput over the in-process limit, latency over an in-process run.

    Without a limit, the median compute time of a window stands for the run, and closed loops have no throughput ratio.
    """
    found: dict[str, float] = {}
    for each in rows:
        if limit is not None and each.loop == "closed":
            found[f"{each.name}: tokens/s over the limit"] = each.tokens_per_s / limit.tokens_per_s
        unit = each.compute_ms if limit is None else limit.run_ms
        if unit and each.p50_ms is not None and each.p99_ms is not None:
            found[f"{each.name}: p50 over {'compute' if limit is None else 'a run'}"] = each.p50_ms / unit
            found[f"{each.name}: p99 over {'compute' if limit is None else 'a run'}"] = each.p99_ms / unit
    return found
