"""The last look at a graph before it is quantized: every weight must sit where the quantizer and the proof expect it.

requires: a normalised graph. ensures: weights of rank >= 2 are second inputs of MatMul, or vectors in elementwise
operators. Anything else would be served unquantized or with kernels whose exactness was never measured.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from export.errors import ExportError
from export.quantize import DOMAIN

_ELEMENTWISE: Final = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "PRelu", "Where"})
_FLOATS: Final = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


def check_weights(model: ir.Model) -> None:
    """Check every use of every floating-point initializer in the graph and its subgraphs.

    Raises:
        ExportError: names the operator, the node and the weight of the first use that is not supported.
    """
    for node in model.graph.all_nodes():
        for position, value in enumerate(node.inputs):
            if value is not None and (shape := _weight_shape(value)) is not None:
                _check_use(node, position, value, shape)


def _check_use(node: ir.Node, position: int, value: ir.Value, shape: tuple[int, ...]) -> None:
    where = f"operator {node.op_type} (node {node.name!r}) uses the weight {value.name!r} of shape {shape}"
    if (node.domain, node.op_type) == ("", "MatMul"):
        if position == 1 and len(shape) == 2:
            return
        raise ExportError(
            f"{where} as input {position}: only a weight of rank 2 on the right of a MatMul can be quantized and proved"
        )
    if len(shape) < 2 or node.domain == DOMAIN:  # an intent reads its tables in its own way
        return
    if node.domain == "" and node.op_type in _ELEMENTWISE and sum(dim > 1 for dim in shape) <= 1:
        return
    raise ExportError(f"{where}: only MatMul may use a matrix; write it as nn.Linear, or leave it out of the module")


def _weight_shape(value: ir.Value) -> tuple[int, ...] | None:
    tensor = value.const_value
    if tensor is None and value.is_initializer():
        raise ExportError(f"the weight {value.name!r} has no values in the exported graph")
    if tensor is None or tensor.dtype not in _FLOATS:
        return None
    return tuple(int(dim) for dim in tensor.shape)  # type: ignore[arg-type]
