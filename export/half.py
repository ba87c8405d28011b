"""A float graph in half precision: an IR pass. It knows no file and no bundle, and runs nothing.

Weight matmuls, the additions and products around them and, in float16, attention and activations work in half; norms,
softmax, routers and everything else stay float32 between casts, and so do the graph's inputs and outputs. What would
come near float16's largest number on the calibration's tokens stays float32 too, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import onnx_ir as ir

from export.lowering.attention import VARLEN_ATTENTION
from export.lowering.cross_attention import VARLEN_CROSS_ATTENTION
from export.quantization.calibration import Activations
from export.quantization.forms import DOMAIN
from export.quantization.matmuls import weight_matmuls
from export.routing import is_router
from service.manifest import WeightMatmul

HalfPrecision = Literal["fp16", "bf16"]

# A quarter of float16's largest: tokens that were not seen are larger than those that were.
FP16_RANGE: Final = 65504 / 4
TYPES: Final[Mapping[HalfPrecision, ir.DataType]] = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_FORMS: Final[Mapping[HalfPrecision, Literal["float16", "bfloat16"]]] = {"fp16": "float16", "bf16": "bfloat16"}

# Operators that ONNX Runtime's CUDA provider has in the type; PackedMultiHeadAttention has no bfloat16.
_MOVES: Final = frozenset({"Split", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity"})
_LINEAR: Final = frozenset(("", name) for name in ("MatMul", "Add", "Mul", *_MOVES))
_ALSO_IN_FP16: Final = frozenset(
    {("", name) for name in ("Sub", "Div", "Relu", "Gelu", "Sigmoid", "Tanh", "Erf")}
    | {(DOMAIN, VARLEN_ATTENTION), (DOMAIN, VARLEN_CROSS_ATTENTION)}
)
_TYPE_OF_FIRST: Final = frozenset({"MatMul", "Add", "Mul", "Sub", "Div", "Relu", "Gelu", "Sigmoid", "Tanh", "Erf"})
_OPERATORS: Final = {"fp16": _LINEAR | _ALSO_IN_FP16, "bf16": _LINEAR}


def scanned_widths(model: ir.Model) -> dict[str, int]:
    """Name -> width of the rows that float16 would hold: inputs and outputs of the operators that may become half."""
    widths: dict[str, int] = {}
    for node in _candidates(model, "fp16"):
        for value in (*node.inputs, *node.outputs):
            if value is None or value.is_initializer() or not _is_float(value) or _is_constant(value):
                continue
            if width := _width(value):
                widths[str(value.name)] = width
    return widths


@dataclass(frozen=True)
class Half:
    """The one candidate of a half precision; see `export.precisions.Candidates`.

    model: the float graph, intents not yet lowered.
    activations: of `scanned_widths(model)`; None for bfloat16, whose range is float32's.
    """

    model: ir.Model
    precision: HalfPrecision
    activations: Activations | None = None
    last: int = 0
    last_quantized: int = 0

    def build(self, step: int) -> ir.Model:
        """The graph in half precision; the float graph stays as it is."""
        made = self.model.clone()
        kept = self._kept()
        nodes = {node for node in _candidates(made, self.precision) if _outputs(node).isdisjoint(kept)}
        _convert(made, nodes, TYPES[self.precision])
        return made

    def matmuls(self, step: int) -> list[WeightMatmul]:
        """Each weight matmul in the half type, or in float32 where its numbers are too large."""
        kept = self._kept()
        return [
            WeightMatmul(
                weight=str(weight.name),
                form=_FORMS[self.precision] if _outputs(node).isdisjoint(kept) else "float32",
            )
            for node, _, weight in weight_matmuls(self.model.graph)
        ]

    def _kept(self) -> set[str]:
        """First outputs of the operators that stay float32: one of their numbers is beyond the range."""
        if self.precision == "bf16":
            return set()
        assert self.activations is not None
        large = set()
        for name in scanned_widths(self.model):
            rows = self.activations.rows(name)
            if rows.size and not np.abs(rows).max() <= FP16_RANGE:  # NaN stays out of it too
                large.add(name)
        kept: set[str] = set()
        for node in _candidates(self.model, "fp16"):
            values = [value for value in (*node.inputs, *node.outputs) if value is not None]
            if any(value.name in large or _is_large_weight(value) for value in values):
                kept |= _outputs(node)
        return kept


def _candidates(model: ir.Model, precision: HalfPrecision) -> list[ir.Node]:
    """Operators of the main graph that compute with float32 tokens and may do it in half.

    What is not a matmul or attention takes a result of theirs. A number for each row is a norm's, or an expert's share:
    what takes one stays float32, and so does all that only it feeds.
    """
    found: dict[ir.Node, None] = {}
    for node in model.graph:
        if (node.domain, node.op_type) not in _OPERATORS[precision] or not all(map(_is_float, node.outputs)):
            continue
        floats = [value for value in node.inputs if value is not None and _is_float(value)]
        if (node.domain, node.op_type) == ("", "MatMul"):
            weight = node.inputs[1]
            suits = weight is not None and weight.is_initializer() and not is_router(node)
        elif node.domain == DOMAIN:
            suits = True
        else:
            per_row = any(_width(value) == 1 and not value.is_initializer() for value in floats)
            suits = not per_row and any(value.producer() in found for value in floats)
        if suits:
            found[node] = None
    return list(found)


def _width(value: ir.Value) -> int | None:
    """Numbers in a row, if they are known."""
    producer = value.producer()
    if value.shape is None and producer is not None and producer.op_type == "MatMul" and producer.inputs[1] is not None:
        return _width(producer.inputs[1])
    last = value.shape[-1] if value.shape else None
    return last if isinstance(last, int) else None


def _outputs(node: ir.Node) -> set[str]:
    return {str(value.name) for value in node.outputs}


def _is_float(value: ir.Value) -> bool:
    """Whether it holds float32; torch's exporter and the passes after it leave some types to be told by the inputs."""
    if value.dtype is not None:
        return value.dtype == ir.DataType.FLOAT
    if value.is_initializer():
        return value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT
    producer = value.producer()
    if producer is None or producer.op_type not in _TYPE_OF_FIRST:
        return False
    first = producer.inputs[0]
    return first is not None and _is_float(first)


def _is_constant(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "Constant"


def _is_large_weight(value: ir.Value) -> bool:
    if not value.is_initializer() or value.const_value is None or value.const_value.dtype != ir.DataType.FLOAT:
        return False
    array = value.const_value.numpy()
    return bool(array.size) and not np.abs(array).max() <= FP16_RANGE


def _convert(model: ir.Model, nodes: set[ir.Node], half: ir.DataType) -> None:
    """Make `nodes` of the main graph work in `half`, in place, with casts where others give or take their values."""
    made: dict[ir.Value, ir.Value] = {}

    def in_half(value: ir.Value, node: ir.Node) -> ir.Value:
        if value not in made:
            name = f"{value.name}.{half.name.lower()}"
            if value.is_initializer():
                assert value.const_value is not None
                tensor = ir.tensor(value.const_value.numpy().astype(half.numpy()), dtype=half, name=name)
                made[value] = ir.Value(name=name, shape=value.shape, type=ir.TensorType(half), const_value=tensor)
                model.graph.initializers.add(made[value])
            else:
                cast = _cast(value, half, name)
                model.graph.insert_before(node, cast)
                made[value] = cast.outputs[0]
        return made[value]

    for node in list(model.graph):
        if node not in nodes:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and _is_float(value):
                node.replace_input_with(index, in_half(value, node))
        for value in node.outputs:
            value.type = ir.TensorType(half)  # a new one: copies of a graph share theirs
            _widen(model, node, value, nodes)
    for value in made:
        if value.is_initializer() and not value.uses() and value.name is not None:
            del model.graph.initializers[value.name]


def _widen(model: ir.Model, node: ir.Node, value: ir.Value, nodes: set[ir.Node]) -> None:
    """Give the users of `value`, now half, that are not half a float32 copy; the graph's output keeps its name."""
    users = [(user, index) for user, index in value.uses() if user not in nodes]
    outputs = [index for index, output in enumerate(model.graph.outputs) if output is value]
    if not users and not outputs:
        return
    name = str(value.name)
    value.name = f"{name}.half"
    cast = _cast(value, ir.DataType.FLOAT, name)
    model.graph.insert_after(node, cast)
    for user, index in users:
        user.replace_input_with(index, cast.outputs[0])
    for index in outputs:
        model.graph.outputs[index] = cast.outputs[0]


def _cast(value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": to}, name=f"cast.{name}")
    cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, to, value.shape
    return cast
