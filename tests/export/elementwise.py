"""Runs one operator on rows alone and on many, and counts where the bits differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from service.packing import Float32
from service.session import session_options

CONTRIB: Final = "com.microsoft"
COLUMNS: Final = (7, 33, 64)  # shorter than a vector, vectors and a rest, vectors alone
ROWS: Final = (1001, 4099)  # several blocks of a thread pool, none of them even
SCALES: Final = (0.1, 1.0, 8.0)


@dataclass(frozen=True)
class Operator:
    """An operator of `inputs` float tensors; positive: its domain; vector: the last input is one row for all."""

    name: str
    domain: str = ""
    inputs: int = 1
    positive: bool = False
    vector: bool = False


def differences(operator: Operator, rng: np.random.Generator) -> int:
    """Values that differ between a row alone and among others, or between one thread and two."""
    return sum(_differences(operator, columns, rng) for columns in COLUMNS)


def _differences(operator: Operator, columns: int, rng: np.random.Generator) -> int:
    alone, *many = (_session(operator, columns, threads) for threads in (1, 1, 2))
    found = 0
    for rows in ROWS:
        probes = [*range(0, rows, rows // 40), rows - 1]
        for scale in SCALES:
            tensors = [_values(operator, (rows, columns), scale, rng) for _ in range(operator.inputs)]
            wanted = np.concatenate([_run(alone, operator, tensors, slice(row, row + 1)) for row in probes])
            outs = [_run(session, operator, tensors, slice(None)) for session in many]
            found += sum(_unequal(out[probes], wanted) for out in outs) + _unequal(*outs)
    return found


def _values(operator: Operator, shape: tuple[int, int], scale: float, rng: np.random.Generator) -> Float32:
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    return np.abs(values) + np.float32(1e-3) if operator.positive else values


def _run(session: ort.InferenceSession, operator: Operator, tensors: list[Float32], rows: slice) -> Float32:
    cut = [tensor[rows] for tensor in tensors]
    if operator.vector:
        cut[-1] = tensors[-1][0]
    out: Float32 = session.run(None, {f"x{index}": tensor for index, tensor in enumerate(cut)})[0]
    return out


def _unequal(left: Float32, right: Float32) -> int:
    return int(np.count_nonzero(left.view(np.int32) != right.view(np.int32)))


def _session(operator: Operator, columns: int, threads: int) -> ort.InferenceSession:
    names = [f"x{index}" for index in range(operator.inputs)]
    shapes: list[list[str | int]] = [["rows", columns] for _ in names]
    if operator.vector:
        shapes[-1] = [columns]
    graph = helper.make_graph(
        [helper.make_node(operator.name, names, ["out"], domain=operator.domain)],
        operator.name,
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in zip(names, shapes, strict=True)
        ],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["rows", columns])],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(CONTRIB, 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), session_options(threads), providers=["CPUExecutionProvider"])
