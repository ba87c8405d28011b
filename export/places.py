"""Operators whose kernel gives a value other last bits depending on where in the tensor it lies.

ONNX Runtime's CPU kernels for them (Eigen's) compute whole vectors with one approximation and what is left over with
another, and every thread's share of a large tensor has its own rest: a token's bits then change with the size of the
window, at about one value in ten thousand, which a sample of windows can miss. Found by running each operator alone on
one row and on many, with one and two threads, as `tests/export/test_places.py` does again; GELU, Tanh, Sigmoid, Erf,
Exp and the other activations showed none. Sin and Cos do, so rotary positions take theirs from a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import onnx_ir as ir

PLACE_DEPENDENT: Final = frozenset({"Softplus", "Mish", "Elu", "Selu", "Celu", "Log", "Sin", "Cos"})


def place_dependent(path: Path) -> list[str]:
    """Names of such operators in the file at `path`, its functions and subgraphs, each once, sorted."""
    model = ir.load(path)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    found = {node.op_type for body in bodies for node in body.all_nodes() if node.domain == ""}
    return sorted(found & PLACE_DEPENDENT)
