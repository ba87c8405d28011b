"""Small ONNX graphs written by hand, so that these tests need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
from onnx import numpy_helper

from service.recheck import Float32
from service.session import open_session

Arrays = Mapping[str, npt.NDArray[np.generic]]


def graph(body: str, arrays: Arrays, *, inputs: str = "float[tokens, d] tokens", opset: int = 21) -> ir.Model:
    """A model with `inputs` and the output `out`, from statements in the ONNX text syntax and its initializers."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    parsed = onnx.parser.parse_model(f"{header} g ({inputs}) => (float[tokens, n] out) {{ {body} }}")
    parsed.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    return ir.from_proto(onnx.shape_inference.infer_shapes(parsed))


def linear(weight: Float32, bias: Float32) -> ir.Model:
    """out = tokens @ weight (K, N) + bias (N,)."""
    return graph("h = MatMul(tokens, w)\n out = Add(h, b)", {"w": weight, "b": bias})


def ffn(w1: Float32, b1: Float32, w2: Float32, b2: Float32) -> ir.Model:
    """out = gelu(tokens @ w1 + b1) @ w2 + b2."""
    body = "h = MatMul(tokens, w1)\n i = Add(h, b1)\n a = Gelu(i)\n o = MatMul(a, w2)\n out = Add(o, b2)"
    return graph(body, {"w1": w1, "b1": b1, "w2": w2, "b2": b2})


def random_ffn(d: int, d_ff: int, seed: int) -> ir.Model:
    """The FFN above with N(0, 1/fan_in) weights and small biases."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, std: float) -> Float32:
        return (std * rng.standard_normal(shape)).astype(np.float32)

    return ffn(normal(d, d_ff, std=d**-0.5), normal(d_ff, std=0.1), normal(d_ff, d, std=d_ff**-0.5), normal(d, std=0.1))


def saved(model: ir.Model, path: Path) -> Path:
    ir.save(model, path)
    return path


def opened(model: ir.Model, path: Path, threads: int = 1) -> ort.InferenceSession:
    """The model, written to `path` and opened as the service would open it."""
    return open_session(saved(model, path), "cpu", threads)


def run(session: ort.InferenceSession, tokens: Float32) -> Float32:
    out: Float32 = session.run(["out"], {"tokens": tokens})[0]
    return out
