"""`tokenslab bench load` and `windows`, whole, on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import bench.cli
import bench.loadtest.sweep
from bench.loadtest.windows import Settings
from bench.server import Server

QUICK = ("--seconds", "0.2", "--warm-up", "0.05", "--rounds", "1", "--threads", "1")


def tokenslab(*words: str) -> Result:
    app = typer.Typer()
    bench.cli.register(app)
    return CliRunner().invoke(app, ["bench", *words])


def test_closed_open_and_replayed_load_become_one_report_and_a_baseline(
    server: Server, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.loadtest.sweep, "LIMIT_S", 0.05)
    (tmp_path / "trace.csv").write_text("at_s,tokens\n0,3\n0.05,9\n0.1,1\n")
    out, html = tmp_path / "new" / "load.json", tmp_path / "load.html"
    command = ["load", "ffn", "--url", server.url, *QUICK, "--sizes", "uniform:1..8", "--connections", "1,2"]
    command += ["--rate", "60", "--trace", str(tmp_path / "trace.csv"), "--bundle", str(models / "ffn" / "1")]
    done = tokenslab(*command, "--out", str(out), "--html", str(html))
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [(row["loop"], row["value"]) for row in found["levels"]] == [
        *(("closed", 1), ("closed", 2)),
        *(("open", 60), ("replay", 1)),
    ]
    assert found["rounds"][3]["rounds"][0]["summary"]["requests"] == 3
    assert found["limit"]["rows"] == 9  # 2 connections of 4.5 tokens
    assert html.read_text().startswith("<!doctype html>")

    for factor, code in ((0.0, 0), (1000.0, 1)):  # a baseline that any run reaches, and one that none does
        lenient = {name: ratio * factor for name, ratio in found["ratios"].items() if name.endswith("the limit")}
        baseline = tmp_path / f"{code}.json"
        baseline.write_text(json.dumps({**found, "ratios": lenient}))
        done = tokenslab(*command, "--ci", str(baseline))
        assert done.exit_code == code, done.output
        assert "Against the baseline" in done.output
        said = [line for line in done.stderr.splitlines() if "regressed: " in line]
        assert len(said) == code * len(lenient)
        for name, line in zip(lenient, said, strict=False):
            assert line.startswith(f"tokenslab bench load: regressed: {name}: ")
            assert line.endswith("now (tolerance 10%)")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["load", "ffn"], "one of --url and --serve"),
        (["load", "ffn", "--url", "http://127.0.0.1:1"], "refused"),
        (["load", "ffn", "--url", "http://127.0.0.1:1", "--rate", "0"], "--rate '0'"),
        (["load", "ffn", "--url", "http://127.0.0.1:1", "--ci", "absent.json"], "no baseline"),
        (["load", "ffn", "--url", "http://127.0.0.1:1", "--header", "x"], "expected 'Name: value'"),
        (["windows", "ffn", "--url", "http://127.0.0.1:1", "--sizes", "none"], "zipf:"),
    ],
)
def test_what_is_wrong_is_one_line_and_not_a_traceback(words: list[str], said: str) -> None:
    done = tokenslab(*words)
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output


def test_a_service_that_lets_nobody_change_its_settings_says_so(server: Server) -> None:
    done = tokenslab("windows", "ffn", "--url", server.url, *QUICK)
    assert done.exit_code == 1
    assert "/v2/settings: 40" in done.output


def test_windows_are_swept_on_the_live_service_and_its_settings_put_back(models: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ops:change-me-change-me\n")
    out = tmp_path / "windows.json"
    with Server(models, 1, tmp_path / "log", "--admin-keys-file", str(tmp_path / "keys")) as server:
        settings = Settings(server.url, (("X-API-Key", "change-me-change-me"),))
        before = settings.read()
        command = ["windows", "ffn", "--url", server.url, "--admin-key", "change-me-change-me", *QUICK, "--sizes", "4"]
        command += ["--budgets", "2,32", "--waits", "1", "--connections", "4", "--out", str(out)]
        done = tokenslab(*command, "--html", str(tmp_path / "windows.html"))
        assert done.exit_code == 0, done.output
        assert settings.read() == before
    points = json.loads(out.read_text())["windows"]
    grid = [(point["max_window_tokens"], point["max_wait_ms"]) for point in points]
    assert grid == [(4, 0), (4, 1), (32, 0), (32, 1)]
    assert points[0]["closed"]["window_tokens"] == 4  # a budget of one request is a window of one request
    assert "recommended: max_window_tokens" in done.output
