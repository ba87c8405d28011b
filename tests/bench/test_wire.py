"""The arithmetic of the wire's cost; the servers are measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import bench.cli
import bench.wire_cli
from bench.timing import Load
from bench.wire import Sample, WireCost


def cost(ratio: float, errors: dict[str, int] | None = None) -> WireCost:
    loads = [("tokenslab", ratio), ("echo", 1.0)]
    return WireCost(
        [
            Sample(name, no, Load(int(1e6 * r), 1.0, 1.0, 1.0, errors or {}), 90.0)
            for no in range(3)
            for name, r in loads
        ]
    )


@pytest.mark.parametrize(
    ("result", "code"),
    [(cost(0.61), 0), (cost(0.59), 1), (cost(0.9, {"status": 1}), 1)],
    ids=["met", "missed", "errors"],
)
def test_a_rate_below_the_bar_or_an_error_fails_the_check(
    result: WireCost, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    app = typer.Typer()
    bench.cli.register(app)
    monkeypatch.setattr(bench.wire_cli, "measure_wire", lambda *_: result)
    out = tmp_path / "new" / "wire.json"
    finished = CliRunner().invoke(app, ["bench", "wire", "--load", "own", "--check", "--out", str(out)])
    assert finished.exit_code == code, finished.output
    assert len(json.loads(out.read_text())["samples"]) == 6
    assert f"rate: {result.rate_ratio.median:.3f}" in finished.output
