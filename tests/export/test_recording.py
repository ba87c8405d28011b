"""`tokenslab verify --write`, with the CPU in CUDA's place: an FFN's float32 file runs on both."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime as ort
import pytest
import typer
from torch import nn
from typer.testing import CliRunner

from export import recording, verification
from export.adapters.random_weights import random_ffn
from export.pipeline import Options, export_module
from service.manifest import MANIFEST, REPORT, read_manifest
from service.session import Provider, open_session


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    options = Options("unmeasured", tmp_path, precisions=("fp32",), providers=("cuda",))
    return export_module(random_ffn(16, 32), options)


def _on_the_cpu(path: Path, provider: Provider, threads: int) -> ort.InferenceSession:
    return open_session(path, "cpu", threads)


def _verify(bundle: Path, *flags: str) -> tuple[int, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    verification.register(app)
    result = CliRunner().invoke(app, ["verify", str(bundle), *flags])
    return result.exit_code, result.output


def test_what_was_measured_is_in_the_manifest(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (recording, verification):
        monkeypatch.setattr(module, "open_session", _on_the_cpu)
    assert read_manifest(bundle).variants[0].certificate.kind == "unmeasured"
    kinds = recording.record(bundle, "cuda", 1, 0)
    (variant,) = read_manifest(bundle).variants
    assert kinds == {"fp32": variant.certificate.kind}
    assert variant.certificate.kind == "exact"
    assert variant.certificate.rows > 0
    assert [row.seq_lens for row in variant.parity] == [row.seq_lens for row in variant.stand_in]
    assert [path.name for path in bundle.glob(".*")] == []
    assert all(finding.failure is None for finding in verification.verify_bundle(bundle, "cuda", 1, 0))


def test_no_sample_makes_an_operator_exact_whose_bits_may_depend_on_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options("placed", tmp_path, precisions=("fp32",), providers=("cuda",), allow_inexact=True)
    bundle = export_module(nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 16)), options)
    for module in (recording, verification):
        monkeypatch.setattr(module, "open_session", _on_the_cpu)
    assert recording.record(bundle, "cuda", 1, 0) == {"fp32": "tolerance"}
    (variant,) = read_manifest(bundle).variants
    assert variant.certificate.checks["a value has the same bits wherever it lies (Softplus)"] is False


def test_a_page_that_was_edited_keeps_no_measurement_out_and_is_named_all_the_same(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the manifest comes from it; the file's own checks decide."""
    for module in (recording, verification):
        monkeypatch.setattr(module, "open_session", _on_the_cpu)
    before = read_manifest(bundle)
    with (bundle / REPORT).open("a") as page:
        page.write("Mind the margins.\n")
    code, output = _verify(bundle, "--provider", "cuda", "--write")
    after = read_manifest(bundle)
    assert (code, after.variants[0].certificate.kind) == (1, "exact")
    assert f"first: report: {REPORT}" in output
    assert "fp32 exact" in output
    assert after.report_sha256 == before.report_sha256, "an edited page does not become the export's own"


def test_a_file_that_does_not_hold_is_not_written(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "open_session", _on_the_cpu)
    path = bundle / MANIFEST
    state = json.loads(path.read_text())
    for row in state["variants"][0]["stand_in"]:
        row["relative_error"] = 0.0
    path.write_text(json.dumps(state))
    monkeypatch.setattr(verification, "_FP32_ERROR", 0.0)
    before = path.read_bytes()
    code, output = _verify(bundle, "--provider", "cuda", "--write")
    assert (code, path.read_bytes()) == (1, before)
    assert "relative error" in output


def test_an_unmeasured_file_is_held_against_its_stand_in(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "open_session", _on_the_cpu)
    assert all(finding.failure is None for finding in verification.verify_bundle(bundle, "cuda", 1, 0))


def test_without_the_provider_nothing_is_written_and_the_error_says_why(bundle: Path) -> None:
    before = (bundle / MANIFEST).read_bytes()
    code, output = _verify(bundle, "--provider", "cuda", "--write")
    assert code == 1
    assert "CUDAExecutionProvider" in output
    assert (bundle / MANIFEST).read_bytes() == before


def test_files_for_the_cpu_are_not_written_anew(tmp_path: Path) -> None:
    bundle = export_module(random_ffn(16, 32), Options("measured", tmp_path, precisions=("fp32",)))
    code, output = _verify(bundle, "--write")
    assert code == 1
    assert "measured when they were exported" in output
