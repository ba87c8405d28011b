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

from service.manifest import Certificate

PLACE_DEPENDENT: Final = frozenset({"Softplus", "Mish", "Elu", "Selu", "Celu", "Log", "Sin", "Cos"})


def place_dependent(path: Path) -> list[str]:
    """Names of such operators in the file at `path`, its functions and subgraphs, each once, sorted."""
    model = ir.load(path)
    bodies: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    found = {node.op_type for body in bodies for node in body.all_nodes() if node.domain == ""}
    return sorted(found & PLACE_DEPENDENT)


def without_places(certificate: Certificate, path: Path) -> Certificate:
    """`certificate` of the file at `path`, not `exact` where such an operator is in it, whatever a sample showed.

    Measured on CPU kernels; those of another provider are under the same doubt until each has been tried there, which
    is why an `unmeasured` certificate carries the check too, for `tokenslab verify --write` to keep.
    """
    places = place_dependent(path)
    if not places:
        return certificate
    check = f"a value has the same bits wherever it lies ({', '.join(places)})"
    kind = "tolerance" if certificate.kind == "exact" else certificate.kind
    return certificate.model_copy(update={"kind": kind, "checks": {**certificate.checks, check: False}})
