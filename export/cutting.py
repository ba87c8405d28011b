"""Cuts the graph of a stack between its layers. It knows ONNX graphs and names of weights, no torch and no bundle.

A place to cut is a value that everything computed from the tokens passes through; what depends on `seq_lens` alone is
computed again on each side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir
from onnx_ir.passes import common

from export.errors import ExportError
from export.graph import INPUT_SEQ_LENS, INPUT_TOKENS, OUTPUT
from export.normalise import parameter_name
from export.quantization.matmuls import weight_matmuls

_LAYER: Final = re.compile(r"blocks\.(\d+)\.")


@dataclass(frozen=True)
class Cut:
    """One part of a stack: layers `first` to `last`, and the values between which they lie."""

    first: int
    last: int
    takes: str
    gives: str


def layer_of(weight: str) -> int | None:
    """The layer of a stack that the parameter `weight` belongs to; None: to none."""
    found = _LAYER.match(weight)
    return None if found is None else int(found[1])


def find_cuts(model: ir.Model, layers: int, parts: int) -> list[Cut]:
    """Where to cut the float graph of a stack of `layers` into `parts` of as equal a number of layers as may be.

    Raises:
        ExportError: there are fewer layers than parts, or a layer is tied to others by more than its tokens.
    """
    if layers < parts:
        raise ExportError(f"{parts} stages: the stack has {layers} layers, and a layer is not cut")
    starts = [round(part * layers / parts) for part in range(parts)] + [layers]
    between = _bottlenecks(model.graph)
    spans = _spans(model.graph)
    borders = [INPUT_TOKENS]
    for start in starts[1:-1]:
        before = max((end for layer, (_, end) in spans.items() if layer < start), default=-1)
        after = min((begin for layer, (begin, _) in spans.items() if layer >= start), default=-1)
        found = [name for at, name in between.items() if before <= at < after]
        if not found:
            raise ExportError(f"stages: no place to cut before layer {start}: it shares more than its tokens")
        borders.append(found[-1])
    borders.append(OUTPUT)
    return [
        Cut(start, end - 1, takes, gives)
        for start, end, takes, gives in zip(starts, starts[1:], borders, borders[1:], strict=False)
    ]


def cut_out(model: ir.Model, cut: Cut) -> ir.Model:
    """The part of `model`, of any precision, as a model of its own: `tokens` and `seq_lens` in, `out` out.

    Its operators, weights and functions are the whole's; `model` stays as it is.

    Raises:
        ExportError: the graph no longer has the values to cut at.
    """
    inputs = [cut.takes, *(value.name for value in model.graph.inputs if value.name == INPUT_SEQ_LENS)]
    try:
        graph = ir.convenience.extract(model.graph, [str(name) for name in inputs], [cut.gives])
    except ValueError as cause:
        raise ExportError(f"stages: {cut.takes!r} to {cut.gives!r} cannot be cut out: {cause}") from cause
    taken, given, tokens = graph.inputs[0], graph.outputs[0], model.graph.inputs[0]
    taken.name, given.name = INPUT_TOKENS, OUTPUT
    taken.shape, taken.type = tokens.shape, tokens.type
    if given.shape is None or given.type is None:
        given.shape, given.type = tokens.shape, tokens.type
    part = ir.Model(
        graph,
        ir_version=model.ir_version,
        functions=[function.clone() for function in model.functions.values()],
    )
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
    )(part)
    return part


def _spans(graph: ir.Graph) -> dict[int, tuple[int, int]]:
    """Layer -> places of its first and last weight matmul in the graph."""
    places = {node: at for at, node in enumerate(graph)}
    spans: dict[int, tuple[int, int]] = {}
    for node, _, weight in weight_matmuls(graph):
        layer = layer_of(parameter_name(weight))
        if layer is not None:
            begin, end = spans.get(layer, (places[node], places[node]))
            spans[layer] = min(begin, places[node]), max(end, places[node])
    return spans


def _bottlenecks(graph: ir.Graph) -> dict[int, str]:
    """Place of a node -> the one value computed from the tokens that is still needed behind it."""
    of_tokens: set[ir.Value] = {value for value in graph.inputs if value.name == INPUT_TOKENS}
    users: dict[ir.Value, int] = {}
    nodes: Sequence[ir.Node] = list(graph)
    for at, node in enumerate(nodes):
        read = [value for value in node.inputs if value in of_tokens and value is not None]
        for value in read:
            users[value] = at
        if read:
            of_tokens.update(node.outputs)
    users |= dict.fromkeys(graph.outputs, len(nodes))
    found: dict[int, str] = {}
    live: set[ir.Value] = {value for value in graph.inputs if value in of_tokens}
    for at, node in enumerate(nodes):
        live.update(value for value in node.outputs if value in of_tokens)
        live = {value for value in live if users.get(value, -1) > at}
        if len(live) == 1:
            found[at] = str(next(iter(live)).name)
    return found
