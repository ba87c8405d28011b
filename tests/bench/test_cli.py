from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bench.cli
from bench.machine import Usage
from bench.matrix import Plan, Results
from bench.measure import Measurement
from bench.process import ServerError
from bench.timing import Load


@pytest.fixture
def tokenslab() -> typer.Typer:
    app = typer.Typer()
    bench.cli.register(app)
    return app


def measured(ratio: float) -> Results:
    load = Load(100, 1.0, 5.0, 9.0)
    usage = Usage(1.0, 0.1, 0.0, 0.0)
    row = Measurement("16x32", "int8", 0, 1, 1.0, 1.0, 1.0, ratio, 256.0, load, usage, 0.0, 0.0, disturbed=False)
    return Results(answers_checked=64, rows=[row])


@pytest.mark.parametrize(("ratio", "flags", "code"), [(0.7, ["--check"], 1), (0.7, [], 0), (0.8, ["--check"], 0)])
def test_a_missed_bar_fails_the_command_only_with_check(
    ratio: float, flags: list[str], code: int, tokenslab: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench.cli, "run_matrix", lambda *_: measured(ratio))
    out = tmp_path / "new" / "results.json"
    finished = CliRunner().invoke(tokenslab, ["bench", "run", "--load", "own", "--out", str(out), *flags])
    assert finished.exit_code == code, finished.output
    written = json.loads(out.read_text())  # a miss is written down too
    assert [row["ratio"] for row in written["rounds"]] == [ratio]


def test_what_was_asked_for_is_what_is_planned(
    tokenslab: typer.Typer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[Plan] = []

    def keep(plan: Plan, *_: object) -> Results:
        plans.append(plan)
        return measured(0.8)

    monkeypatch.setattr(bench.cli, "run_matrix", keep)
    command = ["bench", "run", "--models", str(tmp_path), "--cases", "1x64, skewed", "--precisions", "int8,fp32"]
    assert CliRunner().invoke(tokenslab, [*command, "--threads", "3", "--load", "own"]).exit_code == 0
    (plan,) = plans
    assert (plan.models, plan.cases, plan.precisions) == (tmp_path, ("1x64", "skewed"), ("fp32", "int8"))
    assert (plan.threads, plan.generator.name) == (3, "own client (aiohttp)")


@pytest.mark.parametrize(("option", "value"), [("--cases", "2x2"), ("--precisions", "fp64"), ("--rounds", "0")])
def test_an_option_that_means_nothing_is_refused_by_name(option: str, value: str, tokenslab: typer.Typer) -> None:
    finished = CliRunner().invoke(tokenslab, ["bench", "run", option, value])
    assert finished.exit_code == 2
    assert option in finished.output


def test_a_server_that_fails_is_one_line_and_not_a_traceback(
    tokenslab: typer.Typer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Results:
        raise ServerError("the server exited 1: models/x: no bundle")

    monkeypatch.setattr(bench.cli, "run_matrix", fail)
    finished = CliRunner().invoke(tokenslab, ["bench", "run", "--load", "own"])
    assert finished.exit_code == 1
    assert "tokenslab bench: the server exited 1: models/x: no bundle" in finished.output
