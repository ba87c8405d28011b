from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.load import OwnClient
from bench.machine import Usage
from bench.matrix import Plan, Results
from bench.measure import Measurement
from bench.report import Figure, as_json, figures, table
from bench.skewed import Skewed
from bench.timing import Load, Spread

PLAN = Plan(Path("m"), ("16x32",), ("fp32",), rounds=3, seconds=1, repeats=0, threads=1, generator=OwnClient())


def row(
    case: str, no: int, ratio: float, errors: dict[str, int] | None = None, *, disturbed: bool = False
) -> Measurement:
    load = Load(100, 1.0, 5.0, 9.0, errors or {})
    return Measurement(
        case, "fp32", no, 1, ratio * 100, 100.0, 100.0, ratio, 256.0, load, Usage(1, 1, 0, 0), 0.0, 0.0, disturbed
    )


def skewed(ratio: float) -> Skewed:
    return Skewed("fp32", 0, 1, 700, 16640, ratio * 300, 300.0, ratio, Load(65, 1.0, 5.0, 9.0), 0.0, 0.0, False)


def test_the_median_of_the_rounds_meets_or_misses_the_bar() -> None:
    good = figures(Results(rows=[row("16x32", no, r) for no, r in enumerate([0.7, 0.76, 0.9])]))
    assert [(f.bar, f.ratio, f.passes) for f in good] == [(0.75, Spread(0.76, 0.7, 0.9), True)]
    bad = figures(Results(rows=[row("16x32", no, r) for no, r in enumerate([0.7, 0.74, 0.9])]))
    assert [f.passes for f in bad] == [False]


def test_a_case_without_a_bar_passes_at_any_share() -> None:
    assert [f.passes for f in figures(Results(rows=[row("1x64", 0, 0.1)]))] == [True]


def test_one_error_in_one_round_fails_the_line_and_is_said() -> None:
    lines = figures(Results(rows=[row("1x64", 0, 0.9), row("1x64", 1, 0.9, {"status": 1})]))
    assert [(f.invalid, f.passes) for f in lines] == [(1, False)]
    assert "INVALID: errors in 1 of 2" in rendered(lines)


def test_no_answer_at_all_is_no_valid_round() -> None:
    assert row("1x64", 0, 0.5).valid
    assert not replace(row("1x64", 0, 0.5), load=Load(0, 1.0, 0.0, 0.0)).valid


def test_windows_on_over_off_is_taken_round_by_round() -> None:
    on = [row("16x32", no, r) for no, r in enumerate([0.8, 0.6, 0.9])]
    off = [row("16x32-off", no, r) for no, r in enumerate([0.4, 0.2, 0.5])]
    (line,) = [f for f in figures(Results(rows=on + off)) if "on / off" in f.name]
    assert (line.ratio.median, line.ratio.low, line.ratio.high) == pytest.approx((2.0, 1.8, 3.0))


def test_skewed_lengths_must_reach_ten() -> None:
    assert [(f.bar, f.passes) for f in figures(Results(skewed=[skewed(9.9)]))] == [(10.0, False)]
    assert [f.passes for f in figures(Results(skewed=[skewed(10.1)]))] == [True]


def test_the_table_shows_the_bar_beside_the_figure_and_who_made_the_load() -> None:
    text = rendered(figures(Results(rows=[row("16x32", 0, 0.8), row("16x32", 1, 0.7), row("16x32", 2, 0.71)])))
    assert "0.710" in text
    assert "0.700..0.800" in text
    assert ">= 0.75 MISSED" in text
    assert "own client" in text


def test_the_json_holds_every_round_and_the_machine() -> None:
    results = Results(answers_checked=64, rows=[row("16x32", no, 0.8, disturbed=True) for no in range(3)])
    written = json.loads(json.dumps(as_json(results, PLAN, {"cpu": "some", "cores": 2})))
    assert [r["round"] for r in written["rounds"]] == [0, 1, 2]
    assert [f["disturbed"] for f in written["figures"]] == [3]
    assert written["machine"] == {"cpu": "some", "cores": 2}
    assert written["answers_checked"] == 64


def rendered(lines: list[Figure]) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(table(lines, PLAN))
    return text.getvalue()
