"""One pass over the ONNX IR: Gemm -> MatMul + Add, with the weight as a (K, N) initializer.

Quantizers that look for MatMul skip `Gemm(transB=1)`, which is what the exporter makes of every nn.Linear: a file that
was asked to be quantized would be the float one.

requires: a graph with its weights as initializers.
ensures: no Gemm is left whose second input is an initializer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx_ir as ir

ConstantKey = tuple[ir.Value, bool, float]

_TRANSPOSED: Final = ".T"  # ends the name of a weight that was transposed


def parameter_name(weight: ir.Value) -> str:
    """The module's name of a weight of a normalised graph."""
    return str(weight.name).removesuffix(_TRANSPOSED)


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
    tensor = value.const_value
    assert tensor is not None
    name = f"{value.name}{_TRANSPOSED if transposed else ''}{f'*{factor:g}' if factor != 1.0 else ''}"

    def compute() -> ir.TensorProtocol:
        array = tensor.numpy()
        if factor != 1.0:
            array = (array * np.float32(factor)).astype(array.dtype)
        return ir.tensor(np.ascontiguousarray(array.T) if transposed else array, name=name)

    sizes = tensor.shape.numpy()
    shape = ir.Shape(sizes[::-1] if transposed else sizes)
    # Computed when it is read: a second copy of every weight at once would double the memory of an export.
    made = ir.Value(name=name, const_value=ir.LazyTensor(compute, tensor.dtype, shape, name=name), shape=shape)
    made.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(made)
    return made


def _scalar(graph: ir.Graph, name: str, number: float) -> ir.Value:
    tensor = ir.tensor(np.array(number, dtype=np.float32), name=name)
    made = ir.Value(name=name, const_value=tensor, shape=ir.Shape([]))
    made.type = ir.TensorType(tensor.dtype)
    graph.register_initializer(made)
    return made
