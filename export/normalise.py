"""One pass over the ONNX IR: Gemm -> MatMul + Add, with the weight as a (K, N) initializer.

Quantizers that look for MatMul skip `Gemm(transB=1)`, which is what the exporter makes of every nn.Linear: a file that
was asked to be quantized would be the float one.

requires: a graph with its weights as initializers.
ensures: no Gemm is left whose second input is an initializer.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

ConstantKey = tuple[ir.Value, bool, float]


def gemm_to_matmul(model: ir.Model) -> None:
    """Rewrite every Gemm in place: y = alpha * A' B' + beta * C, with alpha and beta folded into constants.

    A weight or bias that several Gemms share stays one initializer.
    """
    constants: dict[ConstantKey, ir.Value] = {}
    for node in list(model.graph):
        if (node.domain, node.op_type) == ("", "Gemm"):
            _rewrite(model.graph, node, constants)


def _rewrite(graph: ir.Graph, node: ir.Node, constants: dict[ConstantKey, ir.Value]) -> None:
    a, b = node.inputs[0], node.inputs[1]
    c = node.inputs[2] if len(node.inputs) > 2 else None
    assert a is not None
    assert b is not None
    alpha = node.attributes.get_float("alpha", 1.0)
    beta = node.attributes.get_float("beta", 1.0)
    new: list[ir.Node] = []

    def emit(op_type: str, *inputs: ir.Value, **attributes: list[int]) -> ir.Value:
        new.append(ir.node(op_type, inputs, attributes))
        return new[-1].outputs[0]

    def folded(value: ir.Value, transposed: bool, factor: float) -> ir.Value:
        key = (value, transposed, factor)
        if key not in constants:
            constants[key] = _folded(graph, value, transposed=transposed, factor=factor)
        return constants[key]

    if node.attributes.get_int("transA", 0):
        a = emit("Transpose", a, perm=[1, 0])
    transposed = bool(node.attributes.get_int("transB", 0))
    if b.is_initializer():
        out = emit("MatMul", a, folded(b, transposed, alpha))
    else:
        out = emit("MatMul", a, emit("Transpose", b, perm=[1, 0]) if transposed else b)
        if alpha != 1.0:
            out = emit("Mul", out, _scalar(graph, f"{node.name}.alpha", alpha))
    if c is not None and beta != 0.0:
        if c.is_initializer():
            c = folded(c, False, beta)
        elif beta != 1.0:
            c = emit("Mul", c, _scalar(graph, f"{node.name}.beta", beta))
        out = emit("Add", out, c)

    old = node.outputs[0]
    name = old.name
    out.shape, out.type = old.shape, old.type
    for index, made in enumerate(new):
        made.name = f"{node.name}.{index}.{made.op_type}"
        made.outputs[0].name = f"{name}.{index}.{made.op_type}"
    graph.insert_before(node, new)
    old.replace_all_uses_with(out, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    out.name = name


def _folded(graph: ir.Graph, value: ir.Value, *, transposed: bool, factor: float) -> ir.Value:
    if not transposed and factor == 1.0:
        return value
    assert value.const_value is not None
    array = value.const_value.numpy()
    if factor != 1.0:
        array = (array * np.float32(factor)).astype(array.dtype)
    if transposed:
        array = np.ascontiguousarray(array.T)
    suffix = f"{'.T' if transposed else ''}{f'*{factor:g}' if factor != 1.0 else ''}"
    return _initializer(graph, f"{value.name}{suffix}", array)


def _scalar(graph: ir.Graph, name: str, number: float) -> ir.Value:
    return _initializer(graph, name, np.array(number, dtype=np.float32))


def _initializer(graph: ir.Graph, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
    made = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
    made.type = ir.TensorType(ir.tensor(array).dtype)
    graph.register_initializer(made)
    return made
