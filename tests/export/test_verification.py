from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from export.bundle import report_hashes
from export.certify import AS_FP32, NO_NUMBERS
from export.quantize import quantize_int8
from export.reference import read_references
from export.verification import register
from service.errors import BundleError
from service.manifest import MANIFEST, REFERENCE, Manifest, file_sha256, read_manifest
from service.packing import Float32
from tests.export.hand_built import Arrays, graph, random_ffn, saved, write_bundle, write_manifest

D = 16


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    model = random_ffn(D, 64, 0)
    return write_bundle(tmp_path, {"fp32": model, "int8": quantize_int8(model)}, d=D)


def verify(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def replace_fp32(folder: Path, body: str, arrays: Arrays, out: Callable[[Float32], Float32]) -> None:
    """Make another function the bundle's only variant, its reference and its hashes true, its certificate as it was."""
    saved(graph(body, arrays), folder / "fp32.onnx")
    stored = read_references(folder / REFERENCE)
    tokens = {f"tokens_{i}": case.tokens for i, case in enumerate(stored)}
    outs = {f"out_{i}": out(case.tokens) for i, case in enumerate(stored)}
    np.savez(folder / REFERENCE, allow_pickle=False, **tokens, **outs)
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    variant = manifest.variants[0].model_copy(update={"sha256": file_sha256(folder / "fp32.onnx")})
    write_manifest(
        folder,
        manifest.model_copy(update={"variants": [variant], "reference_sha256": file_sha256(folder / REFERENCE)}),
    )


def read_manifest_unchecked(folder: Path) -> Manifest:
    """The manifest, whatever its files hash to."""
    return Manifest.model_validate_json((folder / MANIFEST).read_bytes())


def same(tokens: Float32) -> Float32:
    return tokens


# A NaN anywhere reaches every row.
SPREADS = "m = ReduceMean <keepdims = 1> (tokens)\n z = Mul (m, zero)\n out = Add (tokens, z)"
ZERO: Arrays = {"zero": np.array(0, np.float32)}


def failure(result: Result) -> str:
    """The one line on standard error of a run that must have failed."""
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_a_true_bundle_holds_with_the_figures_of_both_variants(bundle: Path) -> None:
    result = verify(bundle, "--threads", "2")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    for line in ("relative error, worst of 3 inputs", "rows permuted", "beside rows 1000x larger", "certificate"):
        assert result.stdout.count(line) == 2, line
    assert "NaN and Inf give no number where fp32 gives none" in result.stdout
    assert "FAILS" not in result.stdout


@pytest.fixture
def with_report(bundle: Path) -> Path:
    for name in ("report.md", "report.json", "report-error.svg"):
        (bundle / name).write_text(name)
    update = {"report_sha256": report_hashes(bundle)}
    return write_manifest(bundle, read_manifest(bundle).model_copy(update=update))


def test_a_report_as_it_was_written_has_a_line_for_each_file(with_report: Path) -> None:
    result = verify(with_report)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("as written") == 3


@pytest.mark.parametrize("name", ["report.md", "report.json", "report-error.svg"])
@pytest.mark.parametrize("damage", ["edited", "gone"])
def test_a_file_of_the_report_that_is_another_is_named(with_report: Path, name: str, damage: str) -> None:
    path = with_report / name
    if damage == "edited":
        path.write_text("better figures")
    else:
        path.unlink()
    why = f"its SHA-256 is {file_sha256(path)}, the" if damage == "edited" else "No such file"
    assert f"checks failed; first: report: {name}: {path}: {why}" in failure(verify(with_report))


def test_a_manifest_from_before_reports_were_hashed_is_read_and_holds(bundle: Path) -> None:
    text = json.loads((bundle / MANIFEST).read_text())
    del text["report_sha256"]
    (bundle / MANIFEST).write_text(json.dumps(text))
    (bundle / "report.md").write_text("of that time")
    result = verify(bundle)
    assert result.exit_code == 0, result.output
    assert "report" not in result.stdout


def without_fp32(folder: Path) -> Path:
    """Leave the int8 variant alone in the manifest, as `--precision int8` does."""
    manifest = read_manifest(folder)
    int8 = next(variant for variant in manifest.variants if variant.precision == "int8")
    (folder / "fp32.onnx").unlink()
    return write_manifest(folder, manifest.model_copy(update={"variants": [int8], "default_precision": "int8"}))


def test_int8_alone_is_still_held_to_give_no_number_for_nan(bundle: Path) -> None:
    result = verify(without_fp32(bundle))
    assert result.exit_code == 0, result.output
    lines = {line.split("│")[2].strip(): line for line in result.stdout.splitlines() if line.count("│") == 6}
    assert "holds" in lines["rows with NaN or Inf give no number (24 rows)"]
    open_line = lines[f"{AS_FP32} (no fp32 variant here)"]
    assert "not repeated" in open_line
    assert "open" in open_line
    assert "could not be repeated here, marked open: 1" in result.stdout


HIDES_NAN = "bad = IsNaN (tokens)\n clean = Where (bad, zero, tokens)\n out = Mul (clean, one)"


def hide_nan(folder: Path, checks: set[str]) -> None:
    """Put a file that gives numbers for NaN in the place of int8, its reference true, `checks` recorded as held."""
    saved(graph(HIDES_NAN, {"zero": np.array(0, np.float32), "one": np.array(1, np.float32)}), folder / "int8.onnx")
    certificate = read_manifest_unchecked(folder).variants[1].certificate
    kept = {name: held for name, held in certificate.checks.items() if name not in {AS_FP32, NO_NUMBERS} - checks}
    stored = read_references(folder / REFERENCE)
    arrays = {f"{name}_{i}": case.tokens for i, case in enumerate(stored) for name in ("tokens", "out")}
    np.savez(folder / REFERENCE, allow_pickle=False, **arrays)
    manifest = read_manifest_unchecked(folder)
    int8 = manifest.variants[1].model_copy(
        update={
            "sha256": file_sha256(folder / "int8.onnx"),
            "certificate": certificate.model_copy(update={"checks": kept}),
        }
    )
    update = {"variants": [manifest.variants[0], int8], "reference_sha256": file_sha256(folder / REFERENCE)}
    without_fp32(write_manifest(folder, manifest.model_copy(update=update)))


@pytest.mark.parametrize("checks", [{AS_FP32, NO_NUMBERS}, set[str]()])
def test_int8_alone_that_gives_numbers_for_nan_fails(bundle: Path, checks: set[str]) -> None:
    hide_nan(bundle, checks)
    assert "rows with NaN or Inf give no number (24 rows): an input with NaN or Inf gives a plausible" in failure(
        verify(bundle)
    )


def test_numbers_for_nan_that_fp32_gave_too_at_the_export_are_no_failure(bundle: Path) -> None:
    hide_nan(bundle, {AS_FP32})
    result = verify(bundle)
    assert result.exit_code == 0, result.output
    assert f"{AS_FP32} (no fp32 variant here)" in result.stdout


def test_recorded_checks_that_this_version_does_not_make_are_named(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    fp32, int8 = manifest.variants
    certificate = fp32.certificate.model_copy(update={"checks": {**fp32.certificate.checks, "in a vacuum": True}})
    parity = [*fp32.parity, fp32.parity[0].model_copy(update={"seq_lens": [257]})]
    fp32 = fp32.model_copy(update={"certificate": certificate, "parity": parity})
    write_manifest(bundle, manifest.model_copy(update={"variants": [fp32, int8]}))
    result = verify(bundle)
    assert result.exit_code == 0, result.output
    (vacuum,) = [line for line in result.stdout.splitlines() if "in a vacuum" in line]
    (size,) = [line for line in result.stdout.splitlines() if "257 tokens (not in reference.npz)" in line]
    assert "not repeated" in vacuum
    assert "not repeated" in size
    assert "could not be repeated here, marked open: 2" in result.stdout


def test_a_model_folder_means_its_latest_version(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        write_bundle(tmp_path, {"fp32": random_ffn(D, 8, version)}, d=D, version=version)
    assert "demo/10" in verify(tmp_path / "demo").stdout


def test_an_altered_file_is_named(bundle: Path) -> None:
    content = bytearray((bundle / "int8.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "int8.onnx").write_bytes(content)
    assert "int8.onnx: its SHA-256 is" in failure(verify(bundle))


def test_an_altered_reference_is_named(bundle: Path) -> None:
    (bundle / REFERENCE).write_bytes(b"PK")
    assert f"{REFERENCE}: its SHA-256 is" in failure(verify(bundle))


def test_parity_that_is_lost_fails_with_the_numbers(bundle: Path) -> None:
    replace_fp32(bundle, "out = Mul (tokens, two)", {"two": np.array(2, np.float32)}, lambda tokens: tokens * 2.002)
    found = verify(bundle)
    assert (
        "first: fp32: relative error, worst of 3 inputs: "
        "1 tokens: relative error 9.99e-04, recorded 0.00e+00, allowed 2.00e-06" in failure(found)
    )
    assert found.stdout.count("FAILS") == 1


def test_an_exact_certificate_that_does_not_hold_here_names_a_counter_example(bundle: Path) -> None:
    replace_fp32(bundle, SPREADS, ZERO, same)
    assert "first: fp32: beside rows with NaN (24 rows): out[0, 0] is" in failure(verify(bundle))


def test_a_kind_worse_than_recorded_fails_where_no_bits_were_promised(bundle: Path) -> None:
    replace_fp32(bundle, SPREADS, ZERO, same)
    manifest = read_manifest(bundle)
    weaker = manifest.variants[0].certificate.model_copy(update={"kind": "tolerance", "max_drift": 1e-6})
    variant = manifest.variants[0].model_copy(update={"certificate": weaker})
    write_manifest(bundle, manifest.model_copy(update={"variants": [variant]}))
    assert "first: fp32: certificate: recorded as tolerance, dependent on" in failure(verify(bundle))


def test_a_file_that_is_not_position_wise_fails(bundle: Path) -> None:
    replace_fp32(
        bundle, "out = CumSum (tokens, axis)", {"axis": np.array(0, np.int64)}, lambda tokens: np.cumsum(tokens, axis=0)
    )
    assert "first: fp32: rows permuted: not position-wise: 2 rows permuted" in failure(verify(bundle))


def test_a_file_that_does_not_run_is_named(bundle: Path) -> None:
    replace_fp32(bundle, "out = MatMul (tokens, w)", {"w": np.ones((D + 1, D), np.float32)}, same)
    assert "fp32.onnx: it loads but does not run: " in failure(verify(bundle))


def test_a_provider_without_variant_is_refused(bundle: Path) -> None:
    assert "no variant is for provider 'cuda'; there are variants for cpu" in failure(
        verify(bundle, "--provider", "cuda")
    )


def test_a_folder_without_bundle_is_refused(tmp_path: Path) -> None:
    assert "no such bundle" in failure(verify(tmp_path / "nothing"))
    assert "neither manifest.json nor a version folder" in failure(verify(tmp_path))


@pytest.mark.parametrize("arrays", [{}, {"tokens_0": np.zeros((1, 2), np.float32)}])
def test_an_incomplete_reference_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray[tuple[int, ...]]]) -> None:
    np.savez(tmp_path / "r.npz", allow_pickle=False, **arrays)
    with pytest.raises(BundleError, match=r"no array '(tokens|out)_0'"):
        read_references(tmp_path / "r.npz")


def test_it_runs_where_torch_and_onnx_are_not_installed(bundle: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'onnx', 'onnx_ir', 'onnxscript'])); "
        "import tokenslab; tokenslab.main()"
    )
    command = [sys.executable, "-c", code, "verify", str(bundle), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "certificate" in done.stdout
