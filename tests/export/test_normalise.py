"""Every Gemm, whatever its attributes, becomes MatMul + Add with the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from export.normalise import gemm_to_matmul


def gemm_model(*, trans_a: int, trans_b: int, alpha: float, beta: float, constant: str, twice: bool) -> onnx.ModelProto:
    rng = np.random.default_rng(trans_a + 2 * trans_b)
    shapes = {"x": [4, 3] if trans_a else [3, 4], "w": [5, 4] if trans_b else [4, 5], "c": [5]}
    inits = [numpy_helper.from_array(rng.standard_normal(shapes[name]).astype(np.float32), name) for name in constant]
    attributes: dict[str, Any] = {"transA": trans_a, "transB": trans_b, "alpha": alpha, "beta": beta}
    nodes = [helper.make_node("Gemm", ["x", "w", "c"], ["y0"], name="first", **attributes)]
    if twice:
        nodes.append(helper.make_node("Gemm", ["x", "w", "c"], ["y1"], name="second", **attributes))
    nodes.append(helper.make_node("Add", ["y0", "y1" if twice else "y0"], ["y"], name="sum"))
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in "xwc" if name not in constant
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 5])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, inits)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model: onnx.ModelProto) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(7)
    feeds = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in session.get_inputs()}
    out: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = session.run(None, feeds)[0]
    return out


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (0.5, 2.0), (2.0, 0.0)])
@pytest.mark.parametrize("constant", ["wc", "w", ""])
@pytest.mark.parametrize("twice", [False, True])
def test_gemm_becomes_matmul_and_add(
    trans_a: int, trans_b: int, alpha: float, beta: float, constant: str, twice: bool
) -> None:
    before = gemm_model(trans_a=trans_a, trans_b=trans_b, alpha=alpha, beta=beta, constant=constant, twice=twice)
    model = ir.serde.deserialize_model(before)
    gemm_to_matmul(model)
    after = ir.serde.serialize_model(model)
    onnx.checker.check_model(after, full_check=True)
    assert "Gemm" not in {node.op_type for node in after.graph.node}
    np.testing.assert_allclose(run(after), run(before), rtol=1e-5, atol=1e-6)


def test_a_weight_that_two_gemms_share_stays_one_initializer() -> None:
    before = gemm_model(trans_a=0, trans_b=1, alpha=1.0, beta=1.0, constant="wc", twice=True)
    model = ir.serde.deserialize_model(before)
    gemm_to_matmul(model)
    weights = {node.inputs[1].name for node in model.graph if node.op_type == "MatMul" and node.inputs[1]}
    assert weights == {"w.T"}
