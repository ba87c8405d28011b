"""Weight matmuls -> int8: a pass over the ONNX IR. It owns the arithmetic; it knows no torch, no file and no bundle.

Activations are quantized per token at run time (uint8, scale and zero point from that row's range, zero included),
weights per output channel (symmetric, [-127, 127]). For one row x and one column w:

    s = (max(x, 0) - min(x, 0)) / 255    z = round(-min(x, 0) / s)    q = round(x / s) + z
    y = s * (sw * sum(q * qw) - z * sw * sum(qw)) + 0 * mean(x)

Only row-wise scalars, elementwise operators and an exact integer matmul: no row can see another. The bias Add stays
outside, where ONNX Runtime fuses it with a GELU that follows. `bench/int8_forms.py` measures this form against others:
the correction as a rank-1 Gemm onto the product is 1 to 2 % faster, but a Gemm picks its kernel by the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx.parser
import onnx_ir as ir

from export.errors import ExportError
from export.routing import is_router

DOMAIN: Final = "tokenslab"  # of every model-local function and intent
OPERATOR: Final = "QuantizedMatMul"
MIN_OPSET: Final = 21

# The kernel sums uint8 x uint8 products in int32: K * 255 * 255 < 2**31.
MAX_INNER: Final = (2**31 - 1) // (255 * 255)

# Weights are stored uint8 with zero point 128: uint8 x int8 saturates its 16-bit pair sums on AVX2 and AVX-512 without
# VNNI, uint8 x uint8 is exact on all. `tiny` (the smallest normal float32) keeps the division defined for rows of
# zeros. ReduceMax and the casts swallow NaN, so `guard`, 0 or NaN, carries it (and Inf) to the row's output scale. Its
# mean overflows for rows beyond about 1e35, which then give NaN rather than a number.
FUNCTION: Final = f"""
<opset_import: ["": OPSET, "com.microsoft": 1], domain: "{DOMAIN}">
{OPERATOR} (x, weight, scales, column_sums) => (y)
{{
  last = Constant <value_ints = [-1]> ()
  zero = Constant <value = float {{0}}> ()
  one = Constant <value = float {{1}}> ()
  steps = Constant <value = float {{255}}> ()
  tiny = Constant <value = float {{1.17549435e-38}}> ()
  activation_zero = Constant <value = uint8 {{0}}> ()
  weight_zero = Constant <value = uint8 {{128}}> ()

  highest = ReduceMax <keepdims = 1> (x, last)
  lowest = ReduceMin <keepdims = 1> (x, last)
  top = Max (highest, zero)
  bottom = Min (lowest, zero)
  range = Sub (top, bottom)
  step = Div (range, steps)
  scale = Max (step, tiny)
  negative_zero_point = Div (bottom, scale)
  rounded = Round (negative_zero_point)
  zero_point = Neg (rounded)

  row_scale = Squeeze (scale, last)
  row_zero = Squeeze (zero_point, last)
  row_zero_point = Cast <to = 2> (row_zero)
  q = QuantizeLinear <axis = 0> (x, row_scale, row_zero_point)
  product = com.microsoft.MatMulIntegerToFloat (q, weight, one, scales, activation_zero, weight_zero)

  mean = ReduceMean <keepdims = 1> (x, last)
  guard = Mul (mean, zero)
  guarded_scale = Add (scale, guard)
  offset = Mul (zero_point, column_sums)
  centred = Sub (product, offset)
  y = Mul (centred, guarded_scale)
}}
"""


def quantize_int8(model: ir.Model) -> ir.Model:
    """Replace every MatMul by a float32 (K, N) initializer with a call of the function above; `model` stays as it is.

    Those that route tokens to experts stay float: noise there would send tokens elsewhere.

    Initializers per weight: `<name>.int8` uint8 (K, N) with zero point 128, `<name>.scales` float32 (N,) and
    `<name>.column_sums` float32 (1, N), the scaled sums over K. Activations may have any rank. Float weights without
    another use are dropped.

    Raises:
        ExportError: there is no weight matmul, one cannot be replaced, a weight is not finite, or K > 33025.
    """
    model = model.clone()
    graph = model.graph
    quantized: dict[ir.Value, list[ir.Value]] = {}
    for node in list(graph):
        weight = node.inputs[1] if (node.domain, node.op_type) == ("", "MatMul") else None
        if weight is None or not weight.is_initializer() or weight.shape is None or weight.shape.rank() != 2:
            continue
        if is_router(node):
            continue
        if weight not in quantized:
            quantized[weight] = _quantized_initializers(graph, weight)
        _replace(graph, node, weight, quantized[weight])
    if not quantized:
        raise ExportError("int8: there is no weight matmul to quantize (a MatMul by a rank-2 initializer)")
    for weight in quantized:
        if not weight.uses() and not weight.is_graph_output():
            del graph.initializers[str(weight.name)]
    left = [
        f"{node.op_type} {node.name or node.outputs[0].name!r}"
        for node in _weight_operators(model)
        if not is_router(node)
    ]
    if left:
        raise ExportError(f"int8: {len(left)} weight operators would stay in float: {', '.join(left[:5])}")
    opset = model.opset_imports[""]
    if opset < MIN_OPSET:
        raise ExportError(f"int8: the graph has opset {opset}, QuantizeLinear per row needs {MIN_OPSET}")
    # ONNX Runtime wants one version of the standard operators in a file.
    function = ir.serde.deserialize_function(onnx.parser.parse_function(FUNCTION.replace("OPSET", str(opset))))
    model.functions[function.identifier()] = function
    for domain in (DOMAIN, "com.microsoft"):
        model.opset_imports.setdefault(domain, 1)
    return model


def count_weight_matmuls(model: ir.Model) -> int:
    """How many float operators of `model`, its functions and subgraphs multiply tokens by constant weights."""
    return sum(1 for _ in _weight_operators(model))


def count_quantized_matmuls(model: ir.Model) -> int:
    """How many calls of the int8 function the main graph of `model` makes."""
    return sum((node.domain, node.op_type) == (DOMAIN, OPERATOR) for node in model.graph)


# The inputs that multiply; a bias is not among them.
_MULTIPLIES: Final = {"MatMul": 2, "Gemm": 2, "Conv": 2, "ConvTranspose": 2, "Einsum": None, "FusedMatMul": 2}
# A weight behind these is a weight still.
_VIEWS: Final = frozenset({"Transpose", "Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split"})


def _weight_operators(model: ir.Model) -> Iterator[ir.Node]:
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        for node in body.all_nodes():
            if node.op_type in _MULTIPLIES and any(map(_is_weight, node.inputs[: _MULTIPLIES[node.op_type]])):
                yield node


def _is_weight(value: ir.Value | None) -> bool:
    if value is None:
        return False
    if value.is_initializer():
        return True
    producer = value.producer()
    if producer is None:
        return False
    return producer.op_type == "Constant" or (producer.op_type in _VIEWS and _is_weight(producer.inputs[0]))


def _quantized_initializers(graph: ir.Graph, weight: ir.Value) -> list[ir.Value]:
    name = weight.name
    if weight.const_value is None or weight.dtype != ir.DataType.FLOAT:
        raise ExportError(f"int8: weight {name!r} must be a float32 initializer with data, found {weight.dtype}")
    array = weight.const_value.numpy()
    if array.shape[0] > MAX_INNER:
        raise ExportError(
            f"int8: weight {name!r} has {array.shape[0]} rows; uint8 products summed in int32 allow {MAX_INNER}"
        )
    if not np.isfinite(array).all():
        raise ExportError(
            f"int8: weight {name!r} has {np.count_nonzero(~np.isfinite(array))} values that are not finite"
        )
    # A column of zeros has no range: any scale serves. Below the smallest normal float32 a scale would lose its digits.
    scales = np.maximum(np.abs(array).max(axis=0) / np.float32(127), np.finfo(np.float32).tiny)
    levels = np.clip(np.rint(array / scales), -127, 127).astype(np.int32)
    column_sums = (levels.sum(axis=0, keepdims=True) * scales.astype(np.float64)).astype(np.float32)
    if not np.isfinite(column_sums).all():
        raise ExportError(f"int8: weight {name!r} is too large: a column sum overflows float32")
    parts = {"int8": (levels + 128).astype(np.uint8), "scales": scales, "column_sums": column_sums}
    made = []
    for suffix, part in parts.items():
        value = ir.val(f"{name}.{suffix}", const_value=ir.tensor(part, name=f"{name}.{suffix}"))
        graph.register_initializer(value)
        made.append(value)
    return made


def _replace(graph: ir.Graph, node: ir.Node, weight: ir.Value, parts: list[ir.Value]) -> None:
    """Put the call in the place of `node`, between reshapes unless the activations are known to be of rank 2."""
    x, out = node.inputs[0], node.outputs[0]
    assert x is not None
    assert weight.const_value is not None
    inner, width = map(int, weight.const_value.numpy().shape)
    stem = str(out.name)
    nodes: list[ir.Node] = []

    def emit(
        operator: str, inputs: list[ir.Value], name: str, domain: str = "", **attributes: int | list[int]
    ) -> ir.Value:
        made = ir.node(operator, inputs, attributes, domain=domain, name=f"{name}/{operator}")
        made.outputs[0].name = name
        nodes.append(made)
        return made.outputs[0]

    if x.shape is not None and x.shape.rank() == 2:
        result = emit(OPERATOR, [x, *parts], stem, DOMAIN)
    else:
        flat_shape = emit("Constant", [], f"{stem}.flat_shape", value_ints=[-1, inner])
        flat = emit("Reshape", [x, flat_shape], f"{stem}.flat")
        product = emit(OPERATOR, [flat, *parts], f"{stem}.product", DOMAIN)
        leading = emit("Shape", [x], f"{stem}.leading", start=0, end=-1)
        last = emit("Constant", [], f"{stem}.last", value_ints=[width])
        result = emit("Reshape", [product, emit("Concat", [leading, last], f"{stem}.shape", axis=0)], stem)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [out], [result])
