"""Weight matmuls -> calls of model-local functions, whatever the form: what all quantizers share.

A form says how a weight is stored and what its function computes; a quantizer chooses the numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.quantization.forms import DOMAIN, MIN_OPSET
from export.quantization.matmuls import weight_matmuls, weight_operators
from export.routing import is_router
from export.weights_file import let_go
from service.manifest import MatmulForm, WeightMatmul
from service.packing import Float32

Parts = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]  # ending of the initializer's name -> array


class CallForm(Protocol):
    """A kind of weight matmul with a model-local function."""

    @property
    def name(self) -> MatmulForm:
        """In manifests and reports."""

    @property
    def operator(self) -> str:
        """Name of the function, in the domain `tokenslab`."""

    def attributes(self, inner: int, width: int) -> dict[str, int]:
        """Of a call for a weight (inner, width)."""

    def function(self, opset: int) -> ir.Function:
        """The function; its inputs are the activations and the parts of `Encoded`, in order."""


F = TypeVar("F", bound=CallForm)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One weight in one form: its arrays, and the SQNR of this matmul alone, if it was measured."""

    parts: Parts
    sqnr_db: float | None


class MatmulQuantizer(ABC, Generic[F]):
    """Makes the quantized graph of one float graph, for any choice of what each matmul becomes; the float graph stays.

    Subclasses encode one weight at a time; an encoding is made once.
    """

    def __init__(self, model: ir.Model, form: F, precision: str) -> None:
        """Take `model`, which stays as it is from now on.

        Args:
            model: the float graph.
            form: of every weight matmul, unless `build` is told otherwise.
            precision: its name, for messages.

        Raises:
            ExportError: there is no weight matmul, a float operator other than a MatMul holds a weight, or the opset is
                below 21.
        """
        self._model = model
        self._form = form
        self._precision = precision
        self._encoded: dict[tuple[str, str], Encoded] = {}
        found = list(weight_matmuls(model.graph))
        if not found:
            raise ExportError(f"{precision}: there is no weight matmul to quantize (a MatMul by a rank-2 initializer)")
        replaced = {node for node, _x, _weight in found}
        left = [
            f"{node.op_type} {node.name or node.outputs[0].name!r}"
            for node in weight_operators(model)
            if node not in replaced and not is_router(node)
        ]
        if left:
            raise ExportError(f"{precision}: {len(left)} weight operators would stay in float: {', '.join(left[:5])}")
        opset = model.opset_imports[""]
        if opset < MIN_OPSET:
            raise ExportError(f"{precision}: the graph has opset {opset}, QuantizeLinear per row needs {MIN_OPSET}")
        self._activation_of = {str(weight.name): str(x.name) for _node, x, weight in found}

    @abstractmethod
    def encode(self, name: str, weight: Float32, x: str, form: F) -> Encoded:
        """The weight `name` (K, N), finite, which meets the activation `x`, in `form`."""

    @property
    def weights(self) -> list[str]:
        """Names of the weights, each once, in the graph's order."""
        return list(self._activation_of)

    def build(self, instead: Mapping[str, F | None] | None = None) -> ir.Model:
        """The graph with every weight matmul in this quantizer's form, or in what `instead` says (None: float).

        Each part of a weight is an initializer `<name>.<ending>`. Activations may have any rank. Float weights without
        another use are dropped.

        Raises:
            ExportError: a weight is not finite, or does not suit its form; the message names it.
        """
        model = self._model.clone()
        graph = model.graph
        forms: dict[str, F] = {}
        made: dict[str, list[ir.Value]] = {}
        for node, x, weight in list(weight_matmuls(graph)):
            name = str(weight.name)
            form = self._chosen(name, instead)
            if form is None:
                continue
            if name not in made:
                made[name] = _register(graph, name, self._of(weight, str(x.name), form).parts)
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

    def matmuls(self, instead: Mapping[str, F | None] | None = None) -> list[WeightMatmul]:
        """What each weight became in `build(instead)`, and how well it fares alone."""
        return [self._describe(name, x, self._chosen(name, instead)) for name, x in self._activation_of.items()]

    def _describe(self, name: str, x: str, form: F | None) -> WeightMatmul:
        if form is None:
            return WeightMatmul(weight=name, form="float32")
        weight = self._model.graph.initializers[name]
        return WeightMatmul(weight=name, form=form.name, sqnr_db=self._of(weight, x, form).sqnr_db)

    def _chosen(self, name: str, instead: Mapping[str, F | None] | None) -> F | None:
        return self._form if instead is None or name not in instead else instead[name]

    def _of(self, weight: ir.Value, x: str, form: F) -> Encoded:
        name = str(weight.name)
        key = (name, form.name)
        if key not in self._encoded:
            self._encoded[key] = self.encode(name, self._checked(weight), x, form)
            let_go(weight)
        return self._encoded[key]

    def _checked(self, weight: ir.Value) -> Float32:
        name = weight.name
        if weight.const_value is None or weight.dtype != ir.DataType.FLOAT:
            raise ExportError(
                f"{self._precision}: weight {name!r} must be a float32 initializer with data, found {weight.dtype}"
            )
        array: Float32 = weight.const_value.numpy()
        if not np.isfinite(array).all():
            raise ExportError(
                f"{self._precision}: weight {name!r} has {np.count_nonzero(~np.isfinite(array))} values that are not "
                "finite"
            )
        return array


def _register(graph: ir.Graph, name: str, parts: Parts) -> list[ir.Value]:
    made = []
    for ending, part in parts.items():
        value = ir.val(f"{name}.{ending}", const_value=ir.tensor(part, name=f"{name}.{ending}"))
        graph.register_initializer(value)
        made.append(value)
    return made


def _replace(graph: ir.Graph, node: ir.Node, weight: ir.Value, form: CallForm, parts: list[ir.Value]) -> None:
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

    attributes = form.attributes(inner, width)
    if x.shape is not None and x.shape.rank() == 2:
        result = emit(form.operator, [x, *parts], stem, DOMAIN, **attributes)
    else:
        flat_shape = emit("Constant", [], f"{stem}.flat_shape", value_ints=[-1, inner])
        flat = emit("Reshape", [x, flat_shape], f"{stem}.flat")
        product = emit(form.operator, [flat, *parts], f"{stem}.product", DOMAIN, **attributes)
        leading = emit("Shape", [x], f"{stem}.leading", start=0, end=-1)
        last = emit("Constant", [], f"{stem}.last", value_ints=[width])
        result = emit("Reshape", [product, emit("Concat", [leading, last], f"{stem}.shape", axis=0)], stem)
    ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, [out], [result])
