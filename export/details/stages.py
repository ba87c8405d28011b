"""What each stage sees in float, and what each precision makes of it, on the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir

from export.details.document import StageFigures
from export.details.points import Point, points
from export.quantization.calibration import Activations, Feeds
from service.manifest import Precision
from service.packing import Float32

# A channel that reaches so many times the rms of its value: what LLM.int8() (Dettmers et al., 2022) calls an outlier is
# a magnitude of 6 where the rms is about 1.
OUTLIER: Final = 6.0
NAMED: Final = 16
# A hidden unit is active for a token if it reaches this share of the token's largest; exact zeros of a ReLU never do.
ACTIVE: Final = 0.01
EXPERTS: Final = ".experts."


def measure_stages(files: Mapping[Precision, Path], feeds: Feeds, scratch: Path) -> list[StageFigures]:
    """Figures of every stage of the float file, and the SQNR of each other one's values.

    Args:
        files: precision -> its ONNX file; fp32 among them, or none of it is measured.
        feeds: inputs of the one run.
        scratch: a folder for files that go again.
    """
    graph = ir.load(files["fp32"])
    where = points(graph)
    widths = {point.value: point.width for point in where}
    if not widths:
        return []
    float_rows = Activations(graph, widths, [feeds], scratch / "stages.fp32.onnx")
    others: dict[Precision, Activations] = {}
    for precision, path in files.items():
        if precision != "fp32":
            model = ir.load(path)
            names = {value.name for node in model.graph for value in node.outputs}
            here = {value: width for value, width in widths.items() if value in names}
            others[precision] = Activations(model, here, [feeds], scratch / f"stages.{precision}.onnx")
    return [_figures(point, float_rows, others) for point in where if len(float_rows.rows(point.value))]


def _figures(point: Point, float_rows: Activations, others: Mapping[Precision, Activations]) -> StageFigures:
    rows = float_rows.rows(point.value)
    magnitude = np.abs(rows)
    rms = float(np.sqrt(np.mean(np.square(rows, dtype=np.float64))))
    reach = np.flatnonzero(magnitude.max(axis=0) > OUTLIER * rms)
    active = None
    if point.stage == "activation":
        active = float(np.mean(magnitude > ACTIVE * magnitude.max(axis=1, keepdims=True)))
    return StageFigures(
        layer=point.layer,
        stage=point.stage,
        value=point.value,
        weight=point.weight,
        rows=len(rows),
        width=rows.shape[1],
        least=float(rows.min()),
        greatest=float(rows.max()),
        rms=rms,
        outlier_channels=len(reach),
        outliers=reach[:NAMED].tolist(),
        active_share=active,
        # The rows of an expert are those that were sent to it, by a router that may have chosen otherwise.
        sqnr_db={
            precision: channel_sqnr_db(rows, activations.rows(point.value))
            for precision, activations in others.items()
            if activations.has(point.value) and EXPERTS not in (point.weight or "")
        },
    )


def channel_sqnr_db(wanted: Float32, found: Float32) -> float:
    """SQNR of `found` (n, k) in dB, each channel scaled by what fits it best to `wanted`.

    Smoothing moves scales of channels between a value and the weights after it: `found` may be the same value in other
    units. NaN if a value is not finite; 300 at most.
    """
    x, y = wanted.astype(np.float64), found.astype(np.float64)
    power = np.sum(y * y, axis=0)
    scale = np.divide(np.sum(x * y, axis=0), power, out=np.ones_like(power), where=power > 0)
    noise, signal = np.sum(np.square(y * scale - x)), np.sum(np.square(x))
    if not (np.isfinite(noise) and np.isfinite(signal)):
        return float("nan")
    return 300.0 if noise <= signal * 1e-30 else float(10 * np.log10(signal / noise))
