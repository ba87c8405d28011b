"""What a file for CUDA can be held against where there is no CUDA: a graph for the CPU that rounds where it rounds.

Every operator of the main graph works in float32, between roundings to the type that the file has there, as kernels
with float32 accumulators do; attention is the CPU's own. It says what the types cost, and nothing about kernels, speed
or neighbours: a variant that has only this is `unmeasured`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from export.errors import ProofError, first_line
from service.manifest import Certificate

_HALVES: Final = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})

UNMEASURED: Final = Certificate(kind="unmeasured", max_drift=0, rows=0, checks={}, session={}, machine="")


def stand_in(model: ir.Model) -> ir.Model:
    """A copy of `model`, intents not yet lowered, whose operators take and give float32 and round to the half type."""
    made = model.clone()
    for node in list(made.graph):
        if node.op_type == "Cast":
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in _HALVES:
                wide = _cast(value, ir.DataType.FLOAT)
                made.graph.insert_before(node, wide)
                node.replace_input_with(index, wide.outputs[0])
        for value in node.outputs:
            if (half := value.dtype) not in _HALVES or half is None:
                continue
            value.type = ir.TensorType(ir.DataType.FLOAT)  # a new one: copies of a graph share theirs
            users = list(value.uses())
            rounded = _cast(value, half)
            made.graph.insert_after(node, rounded)
            for user, index in users:
                user.replace_input_with(index, rounded.outputs[0])
    return made


def check_resolves(path: Path) -> None:
    """Raise ProofError unless ONNX Runtime accepts the graph's operators, types and shapes; kernels may be missing."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.InferenceSession(str(path.resolve()), options, providers=["CPUExecutionProvider"])
    except NoKernel:  # of PackedMultiHeadAttention, or of a half type: after the graph was found in order
        return
    except Exception as cause:
        raise ProofError(f"{path.name}: ONNX Runtime does not accept the graph: {first_line(cause)}") from cause


def _cast(value: ir.Value, to: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": to})
    cast.outputs[0].dtype, cast.outputs[0].shape = to, value.shape
    return cast
