"""A variant's routers against the reference: a copy of its file that also gives their logits, run on the parity inputs.

The copy may be fused otherwise than the file, so that its logits differ in the last bits: enough to state noise and
flips, and nothing else is taken from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from export.reference import Case
from export.routed import compare_routing
from export.routing import routes
from service.cpu import cpu_quota
from service.manifest import Routing
from service.session import open_session


def measure_routing(
    model: ir.Model, cases: Sequence[Case], folder: Path, save: Callable[[ir.Model, Path], None]
) -> list[Routing]:
    """Noise, margin and flips of each router of `model`, in the order they run; nothing for a model without experts.

    Args:
        model: lowered; it stays as it is.
        cases: with the reference's routing.
        folder: for the copy, which is removed.
        save: writes a model to a path.
    """
    if not routes(model):
        return []
    copy = model.clone()
    names = []
    for node in routes(copy):
        logits = node.inputs[0]
        assert logits is not None
        copy.graph.outputs.append(logits)
        names.append(str(logits.name))
    path = folder / "routing.onnx"
    try:
        save(copy, path)
        session = open_session(path, "cpu", cpu_quota())
    finally:
        path.unlink(missing_ok=True)
    found = []
    for case in cases:
        feeds: dict[str, npt.NDArray[np.generic]] = {"tokens": case.tokens}
        if "seq_lens" in {value.name for value in session.get_inputs()}:
            feeds["seq_lens"] = np.array(case.seq_lens, dtype=np.int64)
        if case.memory is not None:
            feeds |= {"memory": case.memory.rows, "memory_seq_lens": case.memory.seq_lens}
        found.append(session.run(names, feeds))
    return compare_routing([case.routed for case in cases], found)
