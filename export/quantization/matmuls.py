"""Finds what multiplies tokens by constant weights in an ONNX graph. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx_ir as ir

from export.quantization import block_forms, forms, static_form
from export.quantization.forms import DOMAIN
from export.routing import is_router

_OPERATORS: Final = forms.OPERATORS | block_forms.OPERATORS | {static_form.OPERATOR}

# The inputs that multiply; a bias is not among them.
_MULTIPLIES: Final = {"MatMul": 2, "Gemm": 2, "Conv": 2, "ConvTranspose": 2, "Einsum": None, "FusedMatMul": 2}
# A weight behind these is a weight still.
_VIEWS: Final = frozenset({"Transpose", "Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Slice", "Split"})


def weight_matmuls(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
    """Each MatMul of the main graph by a rank-2 initializer: the node, its activations, its weight (K, N).

    Not those that route tokens to experts: noise there would send tokens elsewhere.
    """
    for node in graph:
        if (node.domain, node.op_type) != ("", "MatMul"):
            continue
        x, weight = node.inputs
        if x is None or weight is None or not weight.is_initializer() or is_router(node):
            continue
        if weight.shape is not None and weight.shape.rank() == 2:
            yield node, x, weight


def weight_operators(model: ir.Model) -> Iterator[ir.Node]:
    """The float operators of `model`, its functions and subgraphs that multiply tokens by constant weights."""
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for body in bodies:
        for node in body.all_nodes():
            if node.op_type in _MULTIPLIES and any(map(_is_weight, node.inputs[: _MULTIPLIES[node.op_type]])):
                yield node


def count_weight_matmuls(model: ir.Model) -> int:
    """How many float operators of `model`, its functions and subgraphs multiply tokens by constant weights."""
    return sum(1 for _ in weight_operators(model))


def count_quantized_matmuls(model: ir.Model) -> int:
    """How many calls of quantized matmuls the main graph of `model` makes."""
    return sum(node.domain == DOMAIN and node.op_type in _OPERATORS for node in model.graph)


def _is_weight(value: ir.Value | None) -> bool:
    if value is None:
        return False
    if value.is_initializer():
        return True
    producer = value.producer()
    if producer is None:
        return False
    return producer.op_type == "Constant" or (producer.op_type in _VIEWS and _is_weight(producer.inputs[0]))
