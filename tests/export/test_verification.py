from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from export.quantize import quantize_int8
from export.verification import read_references, register
from service.errors import BundleError
from service.manifest import MANIFEST, REFERENCE, Manifest, file_sha256, read_manifest
from service.recheck import Float32
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
    tokens = {f"tokens_{i}": reference.tokens for i, reference in enumerate(stored)}
    outs = {f"out_{i}": out(reference.tokens) for i, reference in enumerate(stored)}
    np.savez(folder / REFERENCE, allow_pickle=False, **tokens, **outs)
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    variant = manifest.variants[0].model_copy(update={"sha256": file_sha256(folder / "fp32.onnx")})
    write_manifest(
        folder,
        manifest.model_copy(update={"variants": [variant], "reference_sha256": file_sha256(folder / REFERENCE)}),
    )


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
