"""Weight matmuls -> integer ones: a pass over the ONNX IR. It knows no torch, no file and no bundle.

The arithmetic is in `export.quantization.forms`. Smoothing changes the float graph first; then each weight matmul
becomes a call of its form's function, or stays float where the caller says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.quantization.calibration import Activations, spread
from export.quantization.forms import DOMAIN, EIGHT_BIT, MIN_OPSET, Form
from export.quantization.matmuls import count_quantized_matmuls, count_weight_matmuls, weight_matmuls, weight_operators
from export.quantization.rounding import Int32, matmul_sqnr_db, nearest, with_error_feedback
from export.quantization.smoothing import Smoothed, smooth
from export.routing import is_router
from service.manifest import WeightMatmul
from service.packing import Float32

__all__ = ["DOMAIN", "Quantizer", "count_quantized_matmuls", "count_weight_matmuls", "quantize_int8"]

_MEASURED_ROWS: Final = 512  # of the calibration, for a matmul's SQNR: 0.1 dB


@dataclass(frozen=True, slots=True)
class _Rounded:
    parts: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]  # ending of the initializer's name -> array
    sqnr_db: float | None


class Quantizer:
    """Makes the integer graph of one float graph, for any choice of what each matmul becomes; the float graph stays."""

    def __init__(
        self, model: ir.Model, form: Form, activations: Activations | None = None, *, feedback: bool = False
    ) -> None:
        """Smooth a copy of `model` for `form`, if there are `activations` of it.

        Args:
            model: the float graph.
            form: of every weight matmul, unless `build` is told otherwise.
            activations: of `model`, to choose scales on.
            feedback: round weights with error feedback over `activations`, which pays where these are what the model
                meets, and costs accuracy where they are not (docs/precision.md).

        Raises:
            ExportError: there is no weight matmul, a float operator other than a MatMul holds a weight, or the opset is
                below 21.
        """
        self._model = model.clone()
        self._activations = activations
        self._form = form
        self._feedback = feedback
        self._smoothed: Mapping[str, Smoothed] = {} if activations is None else smooth(self._model, activations, form)
        self._rounded: dict[tuple[str, str], _Rounded] = {}
        found = list(weight_matmuls(self._model.graph))
        if not found:
            raise ExportError("int8: there is no weight matmul to quantize (a MatMul by a rank-2 initializer)")
        replaced = {node for node, _x, _weight in found}
        left = [
            f"{node.op_type} {node.name or node.outputs[0].name!r}"
            for node in weight_operators(self._model)
            if node not in replaced and not is_router(node)
        ]
        if left:
            raise ExportError(f"int8: {len(left)} weight operators would stay in float: {', '.join(left[:5])}")
        opset = self._model.opset_imports[""]
        if opset < MIN_OPSET:
            raise ExportError(f"int8: the graph has opset {opset}, QuantizeLinear per row needs {MIN_OPSET}")
        self._weights = {str(weight.name): str(x.name) for _node, x, weight in found}

    @property
    def weights(self) -> list[str]:
        """Names of the weights, each once, in the graph's order."""
        return list(self._weights)

    def build(self, instead: Mapping[str, Form | None] | None = None) -> ir.Model:
        """The graph with every weight matmul in this quantizer's form, or in what `instead` says (None: float).

        Initializers per weight: `<name>.int8` (K, N), with the form's zero point, `<name>.scales` float32 (N,) and
        `<name>.column_sums` float32 (1, N), the scaled sums over K. Activations may have any rank. Float weights
        without another use are dropped.

        Raises:
            ExportError: a weight is not finite, or longer than the form's accumulator allows; the message names it.
        """
        model = self._model.clone()
        graph = model.graph
        forms: dict[str, Form] = {}
        made: dict[str, list[ir.Value]] = {}
        for node, x, weight in list(weight_matmuls(graph)):
            name = str(weight.name)
            form = self._chosen(name, instead)
            if form is None:
                continue
            if name not in made:
                made[name] = _register(graph, name, self._round(weight, str(x.name), form).parts)
            forms[form.operator] = form
            _replace(graph, node, weight, form, made[name])
            if not weight.uses() and not weight.is_graph_output():
                del graph.initializers[name]
        for form in forms.values():
            function = form.function(model.opset_imports[""])
            model.functions[function.identifier()] = function
            for domain in (DOMAIN, "com.microsoft"):
                model.opset_imports.setdefault(domain, 1)
        return model

    def matmuls(self, instead: Mapping[str, Form | None] | None = None) -> list[WeightMatmul]:
        """What each weight became in `build(instead)`, and how well it fared on the calibration's rows."""
        graph = self._model.graph
        described = []
        for name, x in self._weights.items():
            form = self._chosen(name, instead)
            smoothed = self._smoothed.get(x)
            described.append(
                WeightMatmul(
                    weight=name,
                    form="float32" if form is None else form.name,
                    smoothing_alpha=smoothed.alpha if smoothed else None,
                    smoothing_place=smoothed.place if smoothed else None,
                    sqnr_db=None if form is None else self._round(graph.initializers[name], x, form).sqnr_db,
                )
            )
        return described

    def _chosen(self, name: str, instead: Mapping[str, Form | None] | None) -> Form | None:
        return self._form if instead is None or name not in instead else instead[name]

    def _round(self, weight: ir.Value, x: str, form: Form) -> _Rounded:
        key = (str(weight.name), form.name)
        if key not in self._rounded:
            self._rounded[key] = _round(key[0], _checked(weight, form), form, self._rows(x), feedback=self._feedback)
        return self._rounded[key]

    def _rows(self, x: str) -> Float32 | None:
        if self._activations is None:
            return None
        smoothed = self._smoothed.get(x)
        rows = self._activations.rows(smoothed.source if smoothed else x)
        return rows / smoothed.scales if smoothed else rows


def quantize_int8(model: ir.Model, form: Form = EIGHT_BIT) -> ir.Model:
    """`model` with every weight matmul in `form`, without calibration; `model` stays as it is. See `Quantizer`."""
    return Quantizer(model, form).build()


def _checked(weight: ir.Value, form: Form) -> Float32:
    name = weight.name
    if weight.const_value is None or weight.dtype != ir.DataType.FLOAT:
        raise ExportError(f"int8: weight {name!r} must be a float32 initializer with data, found {weight.dtype}")
    array: Float32 = weight.const_value.numpy()
    if array.shape[0] > form.max_inner:
        raise ExportError(
            f"int8: weight {name!r} has {array.shape[0]} rows; {form.name} products summed in int32 allow "
            f"{form.max_inner}"
        )
    if not np.isfinite(array).all():
        raise ExportError(
            f"int8: weight {name!r} has {np.count_nonzero(~np.isfinite(array))} values that are not finite"
        )
    return array


def _round(name: str, array: Float32, form: Form, rows: Float32 | None, *, feedback: bool) -> _Rounded:
    if feedback and rows is not None and len(rows):
        integers, scales = with_error_feedback(array, form.levels, rows)
    else:
        integers, scales = nearest(array, form.levels)
    column_sums = _column_sums(integers, scales)
    if not np.isfinite(column_sums).all():
        raise ExportError(f"int8: weight {name!r} is too large: a column sum overflows float32")
    parts = {"int8": form.stored(integers), "scales": scales, "column_sums": column_sums}
    measured = None
    if rows is not None and len(rows):
        measured = matmul_sqnr_db(spread(rows, _MEASURED_ROWS), array, integers, scales)
    return _Rounded(parts, measured)


def _column_sums(integers: Int32, scales: Float32) -> Float32:
    with np.errstate(over="ignore"):  # the caller looks
        sums: Float32 = (integers.sum(axis=0, keepdims=True) * scales.astype(np.float64)).astype(np.float32)
    return sums


def _register(
    graph: ir.Graph, name: str, parts: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]
) -> list[ir.Value]:
    made = []
    for ending, part in parts.items():
        value = ir.val(f"{name}.{ending}", const_value=ir.tensor(part, name=f"{name}.{ending}"))
        graph.register_initializer(value)
        made.append(value)
    return made


def _replace(graph: ir.Graph, node: ir.Node, weight: ir.Value, form: Form, parts: list[ir.Value]) -> None:
    """Put the call in the place of `node`, between reshapes unless the activations are known to be of rank 2."""
    x, out = node.inputs[0], node.outputs[0]
    assert x is not None
    assert weight.const_value is not None
    inner, width = map(int, weight.const_value.shape)  # type: ignore[arg-type]
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
        result = emit(form.operator, [x, *parts], stem, DOMAIN, inner=inner)
    else:
        flat_shape = emit("Constant", [], f"{stem}.flat_shape", value_ints=[-1, inner])
        flat = emit("Reshape", [x, flat_shape], f"{stem}.flat")
        product = emit(form.operator, [flat, *parts], f"{stem}.product", DOMAIN, inner=inner)
        leading = emit("Shape", [x], f"{stem}.leading", start=0, end=-1)
        last = emit("Constant", [], f"{stem}.last", value_ints=[width])
        result = emit("Reshape", [product, emit("Concat", [leading, last], f"{stem}.shape", axis=0)], stem)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [out], [result])
