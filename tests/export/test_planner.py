"""`--precision auto`: the fastest within the bounds, known losers refused, and the table kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer import Typer
from typer.testing import CliRunner

from export import cli
from export.errors import ExportError
from export.pipeline import Options
from export.planner import Request, candidates, choose
from service.manifest import REPORT, Certificate, Parity, Precision, Speed, Variant, read_manifest


def variant(precision: Precision, sqnr_db: float, drift: float = 0.0) -> Variant:
    return Variant(
        precision=precision,
        provider="cpu",
        file=f"{precision}-cpu.onnx",
        sha256="0" * 64,
        bytes=1,
        quantized_matmuls=0,
        float_matmuls=0,
        parity=[Parity(seq_lens=[1], relative_error=0, sqnr_db=sqnr_db)],
        certificate=Certificate(
            kind="tolerance" if drift else "exact", max_drift=drift, rows=1, checks={}, session={}, machine="here"
        ),
    )


VARIANTS = [variant("fp32", 130), variant("int8", 40), variant("int8-fast", 34), variant("w4", 20, 1e-6)]
TIMES: dict[Precision, tuple[float, float]] = {
    "fp32": (4.0, 4.0), "int8": (3.0, 3.0), "int8-fast": (2.0, 3.0), "w4": (1.0, 1.0)
}  # fmt: skip
SPEEDS = {
    precision: [Speed(tokens=n, us_per_token=us, floor_us_per_token=1) for n, us in zip((1, 64), times, strict=True)]
    for precision, times in TIMES.items()
}


@pytest.mark.parametrize(
    ("max_drift", "min_sqnr", "chosen"),
    [(0.0, None, "int8-fast"), (0.0, 35.0, "int8"), (1e-5, None, "w4"), (1e-7, None, "int8-fast"), (0.0, 50.0, "fp32")],
)
def test_the_fastest_within_the_bounds_is_chosen(max_drift: float, min_sqnr: float | None, chosen: str) -> None:
    request = Request(tokens=(1, 64), max_drift=max_drift)
    plan = choose(request, VARIANTS, SPEEDS, {"bf16": "no kernel"}, min_sqnr)
    assert plan.chosen == chosen
    by_name = {row.name: row for row in plan.candidates}
    assert by_name["bf16"].refused == "no kernel"
    assert by_name["int8"].us_per_token == {1: 3.0, 64: 3.0}
    refused = by_name["w4"].refused
    if max_drift < 1e-6:
        assert refused is not None
        assert "its neighbours move an output by 1.0e-06" in refused or "SQNR" in refused


def test_bounds_that_nothing_holds_are_an_error_with_every_reason() -> None:
    with pytest.raises(ExportError, match=r"no precision is within the bounds: fp32: SQNR 130.0 dB, 200 wanted; int8"):
        choose(Request(tokens=(1, 64)), VARIANTS, SPEEDS, {}, 200)


def test_known_losers_and_what_needs_tokens_are_refused_with_the_reason() -> None:
    without, refused = candidates(Request(), calibrated=False)
    assert "int8-static" not in without
    assert "--calibrate" in refused["int8-static"]
    assert "slower than fp32" in refused["fp16"]
    assert "VNNI" in refused["int8, saturating"]
    known, refused = candidates(Request(), calibrated=True)
    assert set(known) == {*without, "int8-static"}
    assert "int8-static" not in refused


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("cuda"), "--target cuda: plans are measured"),
        (Request(tokens=()), "--tokens"),
        (Request(tokens=(0, 5)), "--tokens 0,5"),
        (Request(max_drift=float("nan")), "--max-drift nan"),
    ],
    ids=["cuda", "none", "zero", "nan"],
)
def test_requests_that_cannot_be_met_are_refused_before_any_work(request_: Request, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        Options("x", plan=request_).check()


@pytest.fixture
def app() -> Typer:
    made = Typer()
    made.callback()(lambda: None)
    cli.register(made)
    return made


def test_auto_measures_here_prints_the_table_and_keeps_what_it_chose(app: Typer, tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).standard_normal((200, 16), dtype=np.float32))
    words = ["export", "random", "ffn", "--d", "16", "--d-ff", "32", "--name", "a", "--models", str(tmp_path / "m")]
    words += ["--precision", "auto", "--tokens", "1,16", "--max-drift", "1e-4", "--min-sqnr", "15"]
    words += ["--calibrate", str(tmp_path / "tokens.npy")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "m" / "a" / "1"
    manifest = read_manifest(folder)
    plan = manifest.plan
    assert plan is not None
    timed = {row.name: row for row in plan.candidates if row.us_per_token}
    assert set(timed) == {"fp32", "int8", "int8-fast", "int8-static", "w8", "w4"}
    assert all(set(row.us_per_token) == {1, 16} for row in timed.values())
    fits = [row for row in timed.values() if row.refused is None]
    assert plan.chosen == min(fits, key=lambda row: row.us_per_token[1] * row.us_per_token[16]).name
    assert manifest.default_precision == plan.chosen
    assert {v.precision for v in manifest.variants} == {"fp32", plan.chosen}
    assert {path.name for path in folder.glob("*.onnx")} == {v.file for v in manifest.variants}
    assert "Plan for cpu" in result.stderr
    assert "**chosen**" in (folder / REPORT).read_text()
    assert json.loads(manifest.model_dump_json())["plan"]["tokens"] == [1, 16]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1,64"], "go with --precision auto"),
        (["--precision", "auto", "--tokens", "many"], "--tokens 'many': expected whole numbers"),
        (["--precision", "auto", "--precision", "int8"], "--precision auto chooses alone"),
        (["--precision", "auto", "--default-precision", "int8"], "default precision: --precision auto chooses it"),
    ],
    ids=["without-auto", "text", "two", "default"],
)
def test_flags_that_contradict_auto_are_refused(app: Typer, tmp_path: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(
        app, ["export", "random", "ffn", "--d", "4", "--d-ff", "4", "--name", "a", "--models", str(tmp_path), *words]
    )
    assert result.exit_code == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
