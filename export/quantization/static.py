"""Weight matmuls with activations in fixed ranges: calibrated by onnxruntime.quantization, one activation at a time.

min-max takes what calibration saw; percentile and entropy (onnxruntime's collectors) clip what is rare for finer steps.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.quantization.calibration import Activations, spread
from export.quantization.calls import Encoded, MatmulQuantizer, Parts
from export.quantization.library import quiet
from export.quantization.rounding import nearest
from export.quantization.static_form import LEVELS, STATIC, WEIGHT_ZERO, StaticForm
from export.relative_error import relative_error, sqnr_db
from service.packing import Float32

CalibrationMethod = Literal["minmax", "percentile", "entropy"]

PERCENTILE: Final = 99.999  # onnxruntime's own default; both sides together lose 10 of a million values
# Of the histograms. onnxruntime's 128 for entropy leave it no threshold to choose; 2,048 take it 3 seconds each.
_BINS: Final = {"percentile": 2048, "entropy": 512}
_LEVELS_COMPARED: Final = 128  # of the entropy method: onnxruntime's default
_MEASURED_ROWS: Final = 256


class StaticQuantizer(MatmulQuantizer[StaticForm]):
    """Weight matmuls in `STATIC`."""

    def __init__(self, model: ir.Model, activations: Activations, method: CalibrationMethod = "minmax") -> None:
        """See `MatmulQuantizer`; `activations` are those of `model`."""
        super().__init__(model.clone(), STATIC, "int8-static")
        self._activations = activations
        self._method = method

    def encode(self, name: str, weight: Float32, x: str, form: StaticForm) -> Encoded:
        """Parts: `x_scale` float32 (), `x_zero` uint8 (), `int8` uint8 (K, N), `scales` float32 (N,), `zeros` (N,).

        Raises:
            ExportError: no calibration token reaches this matmul.
        """
        rows = self._activations.rows(x)
        if not len(rows):
            raise ExportError(f"int8-static: no calibration token reaches {name!r}: its range is unknown")
        scale, zero = activation_scale(rows, self._method)
        integers, scales = nearest(weight, LEVELS)
        parts: Parts = {
            "x_scale": scale,
            "x_zero": zero,
            "int8": (integers + WEIGHT_ZERO).astype(np.uint8),
            "scales": scales,
            "zeros": np.full(scales.shape, WEIGHT_ZERO, np.uint8),
        }
        some = spread(rows, _MEASURED_ROWS)
        rounded = (np.clip(np.rint(some / scale) + zero, 0, 255) - zero).astype(np.float32) * scale
        out = rounded @ (integers * scales).astype(np.float32)
        return Encoded(parts, sqnr_db(relative_error(out, some.astype(np.float64) @ weight)))


def activation_scale(
    rows: Float32, method: CalibrationMethod
) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
    """Scale and zero point () that map the range of `rows` (n, K), as `method` sees it, to uint8."""
    with quiet():
        from onnxruntime.quantization.calibrate import HistogramCollector
        from onnxruntime.quantization.quant_utils import compute_scale_zp

        low, high = rows.min(), rows.max()
        if method != "minmax" and high > low:
            collector = HistogramCollector(
                method,
                False,
                num_bins=_BINS[method],
                num_quantized_bins=_LEVELS_COMPARED,
                percentile=PERCENTILE,
                scenario=None,
            )
            collector.collect({"x": rows})
            low, high = collector.compute_collection_result()["x"][:2]
        zero, scale = compute_scale_zp(
            np.asarray(low, np.float32), np.asarray(high, np.float32), np.array(0, np.uint8), np.array(255, np.uint8)
        )
    return np.asarray(scale, np.float32), np.asarray(zero, np.uint8)
