"""Results as a table with the bars beside the figures, and as JSON with every round. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from bench.cases import CASES, SKEWED, SKEWED_BAR
from bench.matrix import Plan, Results
from bench.measure import Measurement
from bench.timing import Spread


@dataclass(frozen=True, slots=True)
class Figure:
    """One ratio over the rounds, and the bar that its median must reach, if it has one."""

    name: str
    precision: str
    ratio: Spread
    rounds: int
    bar: float | None = None
    invalid: int = 0  # rounds in which a request was not answered with a result
    disturbed: int = 0  # rounds in which somebody else used the machine, in every try
    tokens_per_s: Spread | None = None
    limit: Spread | None = None
    window_tokens: Spread | None = None
    p50_ms: Spread | None = None
    p99_ms: Spread | None = None

    @property
    def passes(self) -> bool:
        """Whether every round is valid and the median reaches the bar."""
        return self.invalid == 0 and (self.bar is None or self.ratio.median >= self.bar)


def figures(results: Results) -> list[Figure]:
    """The lines of the report: each case, windows on over off, and the skewed lengths."""
    precisions = list(dict.fromkeys([*(r.precision for r in results.rows), *(s.precision for s in results.skewed)]))
    lines: list[Figure] = []
    for precision in precisions:
        for case in CASES:
            rows = [r for r in results.rows if (r.case, r.precision) == (case.name, precision)]
            if rows:
                lines.append(_case_figure(case.label, precision, rows, case.bar))
    for precision in precisions:
        lines += _windows_figure(results.rows, precision)
    for precision in precisions:
        skewed = [s for s in results.skewed if s.precision == precision]
        if skewed:
            lines.append(
                Figure(
                    "skewed lengths: packed / padded",
                    precision,
                    Spread.of([s.ratio for s in skewed]),
                    len(skewed),
                    SKEWED_BAR,
                    invalid=sum(not s.valid for s in skewed),
                    disturbed=sum(s.disturbed for s in skewed),
                    tokens_per_s=Spread.of([s.packed_tokens_per_s for s in skewed]),
                    limit=Spread.of([s.padded_tokens_per_s for s in skewed]),
                    p50_ms=Spread.of([s.load.p50_ms for s in skewed]),
                    p99_ms=Spread.of([s.load.p99_ms for s in skewed]),
                )
            )
    return lines


def _case_figure(label: str, precision: str, rows: Sequence[Measurement], bar: float | None) -> Figure:
    return Figure(
        label,
        precision,
        Spread.of([r.ratio for r in rows]),
        len(rows),
        bar,
        invalid=sum(not r.valid for r in rows),
        disturbed=sum(r.disturbed for r in rows),
        tokens_per_s=Spread.of([r.tokens_per_s for r in rows]),
        limit=Spread.of([(r.limit_before + r.limit_after) / 2 for r in rows]),
        window_tokens=Spread.of([r.window_tokens for r in rows]),
        p50_ms=Spread.of([r.load.p50_ms for r in rows]),
        p99_ms=Spread.of([r.load.p99_ms for r in rows]),
    )


def _windows_figure(rows: Sequence[Measurement], precision: str) -> list[Figure]:
    """Windows on over off, round by round: of shares of the limit, so that a machine that slows down cancels out."""
    lines = []
    for off in (case for case in CASES if not case.windows):
        on = next(
            case for case in CASES if case.windows and (case.tokens, case.connections) == (off.tokens, off.connections)
        )
        with_windows = {r.round: r for r in rows if (r.case, r.precision) == (on.name, precision)}
        without = {r.round: r for r in rows if (r.case, r.precision) == (off.name, precision) and r.ratio > 0}
        both = sorted(with_windows.keys() & without.keys())
        if both:
            pairs = [(with_windows[no], without[no]) for no in both]
            lines.append(
                Figure(
                    f"{on.label}: windows on / off",
                    precision,
                    Spread.of([a.ratio / b.ratio for a, b in pairs]),
                    len(pairs),
                    invalid=sum(not (a.valid and b.valid) for a, b in pairs),
                    disturbed=sum(a.disturbed or b.disturbed for a, b in pairs),
                )
            )
    return lines


def table(lines: Sequence[Figure], plan: Plan) -> Table:
    """The figures as a table: medians, with the extremes of the ratio."""
    out = Table(title=f"Share of the in-process limit, {plan.rounds} rounds, load by {plan.generator.name}")
    out.add_column("case", no_wrap=True)
    out.add_column("precision")
    for name in ("ratio", "min..max", "bar", "tokens/s", "limit", "tokens/window", "p50 ms", "p99 ms"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("notes")
    for line in lines:
        bar = "" if line.bar is None else f">= {line.bar:g} {'ok' if line.ratio.median >= line.bar else 'MISSED'}"
        out.add_row(
            line.name,
            line.precision,
            f"{line.ratio.median:.3f}",
            f"{line.ratio.low:.3f}..{line.ratio.high:.3f}",
            bar,
            *(_median(s) for s in (line.tokens_per_s, line.limit, line.window_tokens)),
            *(_median(s, 1) for s in (line.p50_ms, line.p99_ms)),
            _notes(line),
            style=None if line.passes else "bold red",
        )
    return out


def _median(spread: Spread | None, digits: int = 0) -> str:
    return "" if spread is None else f"{spread.median:.{digits}f}"


def _notes(line: Figure) -> str:
    notes = []
    if line.invalid:
        notes.append(f"INVALID: errors in {line.invalid} of {line.rounds}")
    if line.disturbed:
        notes.append(f"disturbed: {line.disturbed} of {line.rounds}")
    return "; ".join(notes)


def as_json(results: Results, plan: Plan, machine: dict[str, str | int | float]) -> dict[str, Any]:
    """Everything that was measured, and under what conditions."""
    return {
        "schema_version": 1,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": {
            "cases": list(plan.cases),
            "precisions": list(plan.precisions),
            "rounds": plan.rounds,
            "seconds": plan.seconds,
            "repeats": plan.repeats,
            "load": plan.generator.name,
        },
        "answers_checked": results.answers_checked,
        "figures": [{**asdict(line), "passes": line.passes} for line in figures(results)],
        "rounds": [{**asdict(row), "valid": row.valid} for row in results.rows],
        SKEWED: [{**asdict(row), "valid": row.valid} for row in results.skewed],
    }
