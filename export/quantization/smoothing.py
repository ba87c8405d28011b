"""Channel scales that move outliers from activations into weights (SmoothQuant, Xiao et al. 2023), by measurement.

x w = (x / c) (c w): the division goes where `folding` finds a place for nothing, or becomes a Mul where that pays. The
strength alpha is chosen for each activation by the SQNR of its matmuls over the calibration's rows, not given. Rows
beside the calibration's count as much: a channel that is quiet in the user's own tokens may be loud in longer
sequences, where scales fitted to its silence would make it louder still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from export.quantization.calibration import Activations, spread
from export.quantization.folding import Place, find_fold, replace_initializer
from export.quantization.forms import Form
from export.quantization.matmuls import weight_matmuls
from export.quantization.rounding import matmul_sqnr_db, nearest
from export.weights_file import let_go
from service.packing import Float32

ALPHAS: Final = (0.35, 0.5, 0.65)
_ROWS: Final = 512  # that alpha is measured on
# A Mul is one pass over the activations, about 1 % of an FFN's time (bench/int8_forms.py); what it must bring for that.
_MULTIPLY_PAYS_DB: Final = 1.0
_FOLD_PAYS_DB: Final = 0.1  # less is noise of the sample
_LARGEST_SCALE: Final = 2.0**10


@dataclass(frozen=True, slots=True)
class Smoothed:
    """What was done to one activation: the channels of the float graph's `source` are divided by `scales` (K,)."""

    source: str
    alpha: float
    place: Place
    scales: Float32


def channel_scales(largest_x: Float32, largest_w: Float32, alpha: float) -> Float32:
    """max|x|^alpha / max|w|^(1 - alpha) for each channel (K,), with a geometric mean of 1; 1 for dead channels."""
    alive = (largest_x > 0) & (largest_w > 0)
    logs = np.zeros(largest_x.shape, np.float64)
    logs[alive] = alpha * np.log(largest_x[alive].astype(np.float64)) - (1 - alpha) * np.log(
        largest_w[alive].astype(np.float64)
    )
    if alive.any():
        logs[alive] -= logs[alive].mean()
    bounded: Float32 = np.exp(np.clip(logs, -np.log(_LARGEST_SCALE), np.log(_LARGEST_SCALE))).astype(np.float32)
    return bounded


def smooth(model: ir.Model, activations: Activations, form: Form) -> Mapping[str, Smoothed]:
    """Rewrite the float `model` in place; it computes what it did, up to rounding.

    Args:
        model: with the weight matmuls and names that `activations` was made from.
        activations: rows at each matmul.
        form: that the matmuls will have.

    Returns:
        Name of each activation that is smoothed, as the matmuls now read it -> how.
    """
    done: dict[str, Smoothed] = {}
    # From the last to the first: what is folded into a weight changes which of its columns are loud.
    for x, consumers in reversed(matmuls_by_activation(model.graph).items()):
        source = str(x.name)
        rows, beside = activations.rows(source), activations.rows_beside(source)
        by_weight = _by_weight(consumers)
        # A weight that other activations meet too would have to be stored once for each.
        if not len(rows) or any(len(weight.uses()) > len(users) for weight, users in by_weight.items()):
            continue
        fold = find_fold(x, consumers)
        margin_db = _MULTIPLY_PAYS_DB if fold is None else _FOLD_PAYS_DB
        samples = [spread(part, _ROWS) for part in (rows, beside) if part is not None and len(part)]
        best = _best(samples, [_array(node) for node in consumers], form, margin_db)
        if best is None:
            _let_all_go(by_weight)
            continue
        alpha, scales = best
        if fold is not None:
            fold.apply(model.graph, scales)
        else:
            _multiply(model.graph, x, consumers, scales)
        for weight, users in by_weight.items():
            replace_initializer(model.graph, [(node, 1) for node in users], _numpy(weight) * scales[:, None])
        _let_all_go(by_weight)
        read = consumers[0].inputs[0]
        assert read is not None
        done[str(read.name)] = Smoothed(source, alpha, "multiply" if fold is None else fold.place, scales)
    return done


def matmuls_by_activation(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Activation -> the weight matmuls that read it, in the graph's order."""
    found: dict[ir.Value, list[ir.Node]] = {}
    for node, x, _weight in weight_matmuls(graph):
        found.setdefault(x, []).append(node)
    return found


def activation_widths(graph: ir.Graph) -> dict[str, int]:
    """Name of each activation of a weight matmul -> its K, in the graph's order."""
    return {str(x.name): len(_array(nodes[0])) for x, nodes in matmuls_by_activation(graph).items()}


def _best(
    samples: Sequence[Float32], weights: Sequence[Float32], form: Form, margin_db: float
) -> tuple[float, Float32] | None:
    """The best alpha and its scales, or None if none is better than no scales by `margin_db`, on average of samples."""
    together = np.concatenate(weights, axis=1)
    largest_x, largest_w = np.abs(np.concatenate(samples)).max(axis=0), np.abs(together).max(axis=1)

    def mean_db(scales: Float32) -> float:
        scaled = together * scales[:, None]
        rounded = nearest(scaled, form.levels)
        return float(np.mean([matmul_sqnr_db(rows / scales, scaled, *rounded) for rows in samples]))

    best: tuple[float, Float32] | None = None
    most = mean_db(np.ones(len(together), np.float32)) + margin_db
    for alpha in ALPHAS:
        scales = channel_scales(largest_x, largest_w, alpha)
        found = mean_db(scales)
        if found > most:
            best, most = (alpha, scales), found
    return best


def _multiply(graph: ir.Graph, x: ir.Value, consumers: Sequence[ir.Node], scales: Float32) -> None:
    name = f"{x.name}.smoothing"
    factor = ir.val(name, const_value=ir.tensor(1 / scales, name=name))
    graph.register_initializer(factor)
    product = ir.node("Mul", [x, factor], name=f"{x.name}.smoothed/Mul")
    product.outputs[0].name = f"{x.name}.smoothed"
    product.outputs[0].shape, product.outputs[0].type = x.shape, x.type
    graph.insert_before(consumers[0], product)
    for node in consumers:
        node.replace_input_with(0, product.outputs[0])


def _by_weight(consumers: Sequence[ir.Node]) -> dict[ir.Value, list[ir.Node]]:
    found: dict[ir.Value, list[ir.Node]] = {}
    for node in consumers:
        weight = node.inputs[1]
        assert weight is not None
        found.setdefault(weight, []).append(node)
    return found


def _let_all_go(weights: Iterable[ir.Value]) -> None:
    for weight in weights:
        let_go(weight)


def _array(node: ir.Node) -> Float32:
    weight = node.inputs[1]
    assert weight is not None
    return _numpy(weight)


def _numpy(weight: ir.Value) -> Float32:
    assert weight.const_value is not None
    array: Float32 = weight.const_value.numpy()
    return array
