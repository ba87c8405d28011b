"""Fixed activation ranges: calibrated, fused to integer kernels, exact beside neighbours, and NaN stays NaN."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from export.errors import ExportError
from export.quantization.static import CalibrationMethod, StaticQuantizer, activation_scale
from export.relative_error import relative_error, sqnr_db
from service.session import session_options
from tests.export.hand_built import opened, random_ffn, run
from tests.export.quantization.graphs import activations


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
def test_static_matmuls_run_as_integers_and_depend_on_no_neighbour(method: CalibrationMethod, tmp_path: Path) -> None:
    graph = random_ffn(64, 96, seed=int(np.random.default_rng().integers(1 << 30)))
    rng = np.random.default_rng(0)
    met = activations(graph, rng.standard_normal((1024, 64), dtype=np.float32), tmp_path)
    quantizer = StaticQuantizer(graph, met, method)
    assert all((matmul.sqnr_db or 0) > 30 for matmul in quantizer.matmuls())
    session = opened(quantizer.build(), tmp_path / "static.onnx")
    tokens = rng.standard_normal((32, 64), dtype=np.float32)
    out = run(session, tokens)
    exact = run(opened(graph, tmp_path / "fp32.onnx"), tokens).astype(np.float64)
    assert sqnr_db(relative_error(out, exact)) > 24
    loud = np.concatenate([1000 * tokens[:1], np.full((1, 64), np.nan, np.float32), tokens])
    np.testing.assert_array_equal(run(session, loud)[2:], out)
    assert np.isnan(run(session, loud)[1]).all()

    options = session_options(1)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(str(tmp_path / "static.onnx"), options, providers=["CPUExecutionProvider"])
    fused = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert fused.count("MatMulIntegerToFloat") == 2
    assert not {"MatMul", "Gemm", "FusedMatMul", "DequantizeLinear"} & set(fused)


def test_clipping_methods_choose_smaller_ranges_for_rare_outliers() -> None:
    rows = np.random.default_rng(0).standard_normal((2000, 64), dtype=np.float32)
    rows[7, 3] = 40
    widest, _ = activation_scale(rows, "minmax")
    assert activation_scale(rows, "entropy")[0] < widest / 2
    assert activation_scale(rows, "percentile")[0] < widest


@pytest.mark.parametrize("constant", [0.0, 3.0, -2.0])
@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
def test_an_activation_that_never_changes_is_kept(constant: float, method: CalibrationMethod) -> None:
    scale, zero = activation_scale(np.full((16, 4), constant, np.float32), method)
    rounded = (np.clip(np.rint(constant / scale) + zero, 0, 255) - float(zero)) * scale
    np.testing.assert_allclose(rounded, constant, rtol=1e-6)


def test_a_matmul_that_no_token_reaches_has_no_range(tmp_path: Path) -> None:
    graph = random_ffn(8, 8, seed=0)
    quantizer = StaticQuantizer(graph, activations(graph, np.zeros((0, 8), np.float32), tmp_path))
    with pytest.raises(ExportError, match=r"int8-static: no calibration token reaches .*: its range is unknown"):
        quantizer.build()
