"""The floor holds a file's weight matmuls, all of them and nothing else, at the shapes that they run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.errors import ExportError
from export.floor import bare_matmuls, measure_speed
from export.optimized import optimized, weight_kernels
from export.quantize import quantize_int8
from service.manifest import read_manifest
from tests.export.hand_built import graph, opened, random_ffn, saved, write_bundle


def test_the_floor_of_each_precision_is_its_own_kernels(tmp_path: Path) -> None:
    model = random_ffn(16, 64, 0)
    folder = write_bundle(tmp_path, {"fp32": model, "int8": quantize_int8(model)}, d=16)
    kernels = {
        v.precision: [n.op_type for n in weight_kernels(optimized(folder / v.file, "cpu"))]
        for v in read_manifest(folder).variants
    }
    assert kernels["int8"] == ["MatMulIntegerToFloat"] * 2
    assert set(kernels["fp32"]) <= {"Gemm", "MatMul"}
    assert len(kernels["fp32"]) == 2

    speeds = measure_speed(folder, read_manifest(folder), (3, 40), seconds=0.01)
    assert {precision: [s.tokens for s in found] for precision, found in speeds.items()} == {
        "fp32": [3, 40],
        "int8": [3, 40],
    }
    assert all(s.share_of_floor < 1 for s in speeds["int8"]), "quantizing the rows is not in the floor"
    for found in speeds.values():
        assert found[1].us_per_token < found[0].us_per_token, "forty tokens share what three pay"


def test_the_floor_computes_what_the_matmuls_of_the_file_compute(tmp_path: Path) -> None:
    w, b = (np.random.default_rng().standard_normal(s).astype(np.float32) for s in ((5, 7), (7,)))
    model = graph("h = MatMul(tokens, w)\n i = Add(h, b)\n out = Relu(i)", {"w": w, "b": b})
    path = saved(model, tmp_path / "whole.onnx")
    tokens = np.random.default_rng().standard_normal((4, 5)).astype(np.float32)
    floor = opened(bare_matmuls(optimized(path, "cpu"), {"tokens": tokens}), tmp_path / "floor.onnx")
    (product,) = floor.run(None, {"tokens": tokens})
    np.testing.assert_allclose(np.maximum(product, 0), np.maximum(tokens @ w + b, 0), atol=1e-5)


def test_a_file_without_weights_has_no_floor(tmp_path: Path) -> None:
    path = saved(graph("out = Relu(tokens)", {}), tmp_path / "none.onnx")
    with pytest.raises(ExportError, match="no weight matmul"):
        bare_matmuls(optimized(path, "cpu"), {})
