"""The bars of latency, and a whole tiny run against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bench.cli
import bench.latency_cli
import bench.loadtest.latency
from bench.bundles import Bundle
from bench.loadtest.ideal import Ideal
from bench.loadtest.latency import Plan, Round, verdicts
from service.manifest import read_manifest
from tests.bench.loadtest.stages import measured


def one_round(p99: float = 10.0, light: float = 5.0, errors: dict[str, int] | None = None) -> Round:
    tail = measured(p99=p99, compute=4.0, errors=errors)
    return Round(4.0, measured(p50=light), measured(), (measured(), tail, measured()), 0.0, (Ideal(9.0, 3.0),) * 3)


@pytest.mark.parametrize(
    ("rounds", "code"),
    [
        ([one_round(16.0, 6.2)], 0),
        ([one_round(16.1)], 1),
        ([one_round(light=6.3)], 1),
        ([one_round(), one_round(40.0), one_round()], 0),
        ([one_round(errors={"status 503": 1})], 1),
    ],
    ids=["at the bars", "slow tail", "slow light load", "median of rounds", "errors"],
)
def test_a_missed_bar_or_an_error_fails_the_check(
    rounds: list[Round], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = typer.Typer()
    bench.cli.register(app)
    monkeypatch.setattr(bench.latency_cli, "measure_latency", lambda *_: rounds)
    out = tmp_path / "new" / "latency.json"
    finished = CliRunner().invoke(app, ["bench", "latency", "--check", "--out", str(out)])
    assert finished.exit_code == code, finished.output
    assert len(json.loads(out.read_text())["rounds"]) == len(rounds)
    assert "p99 at 70% of the maximum" in finished.output
    assert "p99 of an ideal server at 70% / its window: 3.00" in finished.output
    assert CliRunner().invoke(app, ["bench", "latency"]).exit_code == 0


def test_a_run_measures_every_stage_of_a_real_server(
    models: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = models / "ffn" / "1"
    monkeypatch.setattr(bench.loadtest.latency, "ensure", lambda *_: Bundle(folder, read_manifest(folder)))
    monkeypatch.setattr(bench.loadtest.latency, "WARM_UP_S", 0.1)
    monkeypatch.setattr(bench.loadtest.latency, "LIMIT_S", 0.05)
    plan = Plan(models, "fp32", tokens=4, connections=2, rounds=1, seconds=0.3, threads=1)
    (only,) = bench.loadtest.latency.measure_latency(plan, tmp_path, lambda _: None)
    assert not only.closed.summary.open_loop
    assert all(stage.summary.open_loop for stage in only.open_loop)
    offered = [stage.summary.offered_per_s for stage in only.open_loop]
    assert offered == sorted(offered)
    assert offered[2] < 1.5 * only.closed.summary.requests_per_s
    assert all(0 < ideal.compute <= ideal.p99 for ideal in only.ideal)
    assert all(verdict.figure.median > 0 for verdict in verdicts([only]))
