"""Where the channels of an activation can be divided by constants without an operator: in what wrote them.

requires: a float graph with rank-2 weights on the right of MatMuls.
ensures: the graph computes the same function, up to rounding, when the consumer's weight rows are multiplied in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import onnx_ir as ir

from export.quantization.forms import DOMAIN
from export.weights_file import in_the_place_of, let_go
from service.packing import Float32

Place = Literal["norm", "weights", "multiply"]

# Column j of these intents' output is a weighted mean of column j of the value `v` alone, which is input 2.
_LINEAR_IN_V: Final = frozenset({"VarlenAttention", "VarlenCrossAttention"})


@dataclass(frozen=True, slots=True)
class Divided:
    """An initializer whose columns `start` and on, as many as there are scales, are divided."""

    node: ir.Node
    position: int
    start: int


@dataclass(frozen=True, slots=True)
class Fold:
    """The initializers to divide, and what they belong to."""

    place: Place
    parts: tuple[Divided, ...]

    def apply(self, graph: ir.Graph, scales: Float32) -> None:
        """Divide; an initializer that others use stays for them."""
        for part in self.parts:
            old = part.node.inputs[part.position]
            assert old is not None
            assert old.const_value is not None
            array = old.const_value.numpy().copy()
            array[..., part.start : part.start + len(scales)] /= scales
            replace_initializer(graph, [(part.node, part.position)], array)
            let_go(old)


def find_fold(x: ir.Value, consumers: Iterable[ir.Node]) -> Fold | None:
    """What to divide for `x` (..., K) to come out divided, or None where an operator of its own would be needed.

    `consumers` are the matmuls whose rows will be multiplied: nothing else may see `x`, nor what leads to it.
    """
    width = _width(x)
    if width is None or x.is_graph_output() or {use.node for use in x.uses()} != set(consumers):
        return None
    return _upstream(x, width, 0, width)


def replace_initializer(
    graph: ir.Graph, uses: Sequence[tuple[ir.Node, int]], array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    """Put `array` in place of the one initializer that is there in all of `uses` (node, input).

    It takes the old one's name, unless the old one has another use and stays; and where that is in a file, it is too.
    """
    node, position = uses[0]
    old = node.inputs[position]
    assert old is not None
    assert old.is_initializer()
    name = str(old.name)
    if {(use.node, use.idx) for use in old.uses()} == set(uses) and not old.is_graph_output():
        del graph.initializers[name]
    while name in graph.initializers:
        name += ".smoothed"
    new = ir.val(name, const_value=in_the_place_of(old, array, name))
    graph.register_initializer(new)
    for node, position in uses:
        node.replace_input_with(position, new)


def _upstream(value: ir.Value, width: int, start: int, scaled: int) -> Fold | None:
    """Follow `value` (..., width), of which columns start .. start + scaled are divided, to what writes it."""
    node = value.producer()
    if node is None:
        return None
    match (node.domain, node.op_type):
        case ("", "LayerNormalization"):
            return Fold("norm", _gains(node, (1, 2), width, start)) if _vectors(node, (1, 2), width) else None
        case ("", "MatMul"):
            weight = node.inputs[1]
            writes = weight is not None and _const(weight) and weight.shape is not None and weight.shape[1:] == (width,)
            return Fold("weights", (Divided(node, 1, start),)) if writes else None
        case ("", "Relu" | "Identity"):
            return _through(node, 0, width, start, scaled)
        case ("", "Split"):
            return _through_split(node, value, width, start, scaled)
        case ("", "Add"):
            return _through_bias(node, width, start, scaled)
        case ("", "Mul"):
            return _through_product(node, width, start, scaled)
        case (domain, operator) if domain == DOMAIN and operator in _LINEAR_IN_V:
            return _through(node, 2, width, start, scaled)
    return None


def _through(node: ir.Node, position: int, width: int, start: int, scaled: int) -> Fold | None:
    """On to one input, which nothing else may see and which must be as wide."""
    value = node.inputs[position]
    if value is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    found = _width(value)
    return _upstream(value, width, start, scaled) if found is None or found == width else None


def _through_split(node: ir.Node, value: ir.Value, width: int, start: int, scaled: int) -> Fold | None:
    whole = node.inputs[0]
    widths = [_width(output) for output in node.outputs]
    rank = value.shape.rank() if value.shape is not None else 0
    if whole is None or None in widths or node.attributes.get_int("axis", 0) not in (-1, rank - 1):
        return None
    before = sum(found or 0 for found in widths[: node.outputs.index(value)])
    return _through(node, 0, sum(found or 0 for found in widths), before + start, scaled)


def _through_bias(node: ir.Node, width: int, start: int, scaled: int) -> Fold | None:
    for position in (0, 1):
        if _vectors(node, (position,), width):
            found = _through(node, 1 - position, width, start, scaled)
            return None if found is None else Fold(found.place, (*found.parts, Divided(node, position, start)))
    return None


def _through_product(node: ir.Node, width: int, start: int, scaled: int) -> Fold | None:
    for position in (0, 1):  # the gain of an RMSNorm that the exporter wrote out
        if _vectors(node, (position,), width):
            return Fold("norm", (Divided(node, position, start),))
    for position in (1, 0):  # a gated FFN: act(gate) * up
        if (found := _through(node, position, width, start, scaled)) is not None:
            return found
    return None


def _gains(node: ir.Node, positions: Iterable[int], width: int, start: int) -> tuple[Divided, ...]:
    present = [i for i in positions if i < len(node.inputs) and node.inputs[i] is not None]
    return tuple(Divided(node, i, start) for i in present)


def _vectors(node: ir.Node, positions: Iterable[int], width: int) -> bool:
    """Whether the inputs at `positions`, those that are there, are float32 constants of `width` along the last axis."""
    values = [node.inputs[i] for i in positions if i < len(node.inputs)]
    found = [value for value in values if value is not None]
    return bool(found) and all(_const(value) and value.shape is not None and value.shape == (width,) for value in found)


def _const(value: ir.Value) -> bool:
    return value.is_initializer() and value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT


def _width(value: ir.Value) -> int | None:
    last = value.shape[-1] if value.shape is not None and value.shape.rank() else None
    return last if isinstance(last, int) else None
