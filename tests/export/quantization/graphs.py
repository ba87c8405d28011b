"""Float graphs with their activations, as an export's calibration would measure them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from export.quantization.calibration import Activations
from export.quantization.smoothing import activation_widths
from service.packing import Float32


def activations(model: ir.Model, tokens: Float32, folder: Path) -> Activations:
    """What reaches each matmul of `model` when `tokens` (n, d) do."""
    return Activations(model, activation_widths(model.graph), [{"tokens": tokens}], folder / "calibration.onnx")
