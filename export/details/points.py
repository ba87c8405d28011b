"""Where in a float graph the stages of its layers are: by its weight matmuls, which carry the module's own names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

from export.details.document import StageName

# The last words of a weight's name -> what the matmul gives, and what it takes where that is a stage of its own.
_OUT: Final[dict[str, StageName]] = {
    "qkv": "QKV",
    "q": "QKV",
    "kv": "QKV",
    "projection": "router",
    "up": "FFN1",
    "down": "FFN2",
}
_ATTENTION: Final = ("attention", "cross")
_LAYER: Final = re.compile(r"(?:^|\.)(?:blocks|layers)\.(\d+)\.")
_ADAPTER: Final = re.compile(r"\.adapter\d\.")


@dataclass(frozen=True, slots=True)
class Point:
    """One value; see StageFigures."""

    layer: int | None
    stage: StageName
    value: str
    weight: str | None
    width: int


def points(graph: ir.Model) -> list[Point]:
    """The stages of a float graph, in its order; each value once, under its first stage."""
    found: dict[str, Point] = {}
    for point in _all(graph.graph):
        found.setdefault(point.value, point)
    return list(found.values())


def _all(graph: ir.Graph) -> Iterator[Point]:
    beside = _layers_beside(graph)
    for node in graph:
        weight = _initializer(node)
        if (multiplied := _weight_of(node)) is not None:
            yield from _of_matmul(node, multiplied)
        elif _gives_norm(node):
            width = None if weight is None or weight.shape is None else weight.shape[-1]
            if isinstance(width, int) and node.outputs[0].name:
                yield Point(beside[node], "norm", node.outputs[0].name, None, width)


def _layers_beside(graph: ir.Graph) -> dict[ir.Node, int | None]:
    """The layer that each node stands in. Norms alike share their weights, and so a name that says another's layer.

    Where norms go first in a layer, a node belongs to the matmul after it; else to the one before it.
    """
    nodes = list(graph)
    matmuls = {no: weight for no, node in enumerate(nodes) if (weight := _weight_of(node)) is not None}
    norms = [no for no, node in enumerate(nodes) if _gives_norm(node)]
    norm_first = bool(matmuls and norms) and norms[0] < min(matmuls)
    layers: dict[ir.Node, int | None] = {}
    layer: int | None = None
    for no in reversed(range(len(nodes))) if norm_first else range(len(nodes)):
        layer = _layer(matmuls[no].name) if no in matmuls else layer
        layers[nodes[no]] = layer
    return layers


def _weight_of(node: ir.Node) -> ir.Value | None:
    weight = _initializer(node)
    return weight if node.op_type == "MatMul" and weight is not None and node.inputs[1] is weight else None


def _of_matmul(node: ir.Node, weight: ir.Value) -> Iterator[Point]:
    name = (weight.name or "").removesuffix(".T").removesuffix(".weight")
    inner, width = (weight.shape[0], weight.shape[1]) if weight.shape is not None else (None, None)
    taken, given = node.inputs[0], _with_bias(node)
    if not (isinstance(inner, int) and isinstance(width, int) and taken is not None and taken.name and given.name):
        return
    *path, last = name.split(".")
    layer = _layer(name + ".")
    if path and path[-1] in _ATTENTION and last == "out":
        yield Point(layer, "attention", taken.name, weight.name, inner)
        yield Point(layer, "attention out", given.name, weight.name, width)
        return
    stage = "matmul" if _ADAPTER.search(f".{name}.") else _OUT.get(last, "matmul")
    if stage == "FFN2":
        yield Point(layer, "activation", taken.name, weight.name, inner)
    yield Point(layer, stage, given.name, weight.name, width)


def _with_bias(node: ir.Node) -> ir.Value:
    """What the matmul gives, with its bias where one is added."""
    out = node.outputs[0]
    users = list(out.uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and _initializer(users[0].node) is not None:
        return users[0].node.outputs[0]
    return out


def _initializer(node: ir.Node) -> ir.Value | None:
    return next((value for value in node.inputs if value is not None and value.is_initializer()), None)


def _gives_norm(node: ir.Node) -> bool:
    weight = _initializer(node)
    named = weight is not None and "norm" in (weight.name or "").lower()
    return node.op_type == "LayerNormalization" or (node.op_type == "Mul" and named)


def _layer(name: str | None) -> int | None:
    found = _LAYER.search(name or "")
    return None if found is None else int(found.group(1))
