"""Finds the fastest candidate of a precision that holds its error budget. It knows files and answers, no bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir
import onnxruntime as ort

from export import parity
from export.errors import NoRoutingMargin, ProofError
from export.lowering import lower
from export.lowering.registry import Provider
from export.precisions import RECIPES, Candidates
from export.quantize import count_quantized_matmuls
from export.reference import Case
from export.routing_noise import measure_routing
from export.stand_in import check_resolves, stand_in
from export.weights_file import SCRATCH, forget, save
from service.cpu import cpu_quota
from service.manifest import Parity, Precision, Routing, WeightMatmul
from service.session import open_session

if TYPE_CHECKING:
    from export.pipeline import Options


@dataclass(frozen=True)
class Written:
    """A candidate in its file, measured against torch, or its stand-in for the CPU was, and `session` is that one's."""

    beside: list[Path]
    model: ir.Model
    session: ort.InferenceSession
    parity: list[Parity]
    routing: list[Routing]
    matmuls: list[WeightMatmul]


def within_budget(
    precision: Precision,
    path: Path,
    provider: Provider,
    graph: ir.Model,
    candidates: Candidates,
    cases: Sequence[Case],
    depth: int,
    options: Options,
) -> Written:
    """The first candidate that holds its bar, in `path`, found by halving: closer ones cost time, not accuracy.

    The bar is an SQNR, and that most tokens have a routing margin. Matmuls stay float only where the user asks for an
    SQNR.

    Raises:
        ExportError: a weight does not suit the precision.
        ProofError: not even the last candidate holds the bar.
    """
    recipe = RECIPES[precision]
    folder = path.parent

    def written(step: int) -> Written:
        model = candidates.build(step)
        runs = model if provider == "cpu" else stand_in(model)
        lower(model, provider)
        forget(graph)
        beside = save(model, path, external_above=options.external_above)
        if runs is model:
            session = open_session(path, provider, cpu_quota())
        else:
            check_resolves(path)
            session = _open_stand_in(runs, folder, options)
        routing = measure_routing(runs, cases, folder, ir.save)
        rows = parity.measure(session, cases, routing)
        return Written(beside, model, session, rows, routing, candidates.matmuls(step))

    bar = None if recipe.sqnr_db is None else max(recipe.sqnr_db, options.min_sqnr or 0)

    found: Written | None = None
    refused: str | None = None  # the message alone: an exception kept holds what its frames held, a session too

    def holds(step: int) -> bool:
        nonlocal found, refused
        found = None  # before another session has all weights once more
        try:
            found, refused = written(step), None
        except NoRoutingMargin as fault:
            refused = str(fault)
            return False
        return bar is None or min(row.sqnr_db for row in found.parity) >= bar

    last = candidates.last_quantized if options.min_sqnr is None else candidates.last
    at = 0
    if not holds(0) and last:
        below, above = 0, last
        while above - below > 1:
            at = (below + above) // 2
            below, above = (below, at) if holds(at) else (at, above)
        if at != above:
            at = above
            holds(at)
    if refused is not None:
        raise NoRoutingMargin(refused)
    assert found is not None
    if at and not count_quantized_matmuls(found.model):
        raise ProofError(f"every weight matmul would have to stay float to hold {bar:g} dB of SQNR")
    parity.check(found.parity, depth, bar)
    return found


def _open_stand_in(runs: ir.Model, folder: Path, options: Options) -> ort.InferenceSession:
    lower(runs, "cpu")
    path = folder / f"{SCRATCH}.onnx"
    beside = save(runs, path, external_above=options.external_above)
    session = open_session(path, "cpu", cpu_quota())
    if not beside:  # else it is mapped into memory, and named in the copies of routing
        path.unlink()
    return session
