"""Weight matmuls -> integer ones: a pass over the ONNX IR. It knows no torch, no file and no bundle.

The arithmetic is in `export.quantization.forms`. Smoothing changes the float graph first; then each weight matmul
becomes a call of its form's function, or stays float where the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import onnx_ir as ir

from export.errors import ExportError
from export.quantization.calibration import Activations, spread
from export.quantization.calls import Encoded, MatmulQuantizer
from export.quantization.forms import DOMAIN, EIGHT_BIT, Form
from export.quantization.matmuls import count_quantized_matmuls, count_weight_matmuls
from export.quantization.rounding import Int32, matmul_sqnr_db, nearest, with_error_feedback
from export.quantization.smoothing import Smoothed, smooth
from service.manifest import WeightMatmul
from service.packing import Float32

__all__ = ["DOMAIN", "Quantizer", "count_quantized_matmuls", "count_weight_matmuls", "quantize_int8"]

_MEASURED_ROWS: Final = 512  # of the calibration, for a matmul's SQNR: 0.1 dB


class Quantizer(MatmulQuantizer[Form]):
    """Makes the integer graph of one float graph, for any choice of what each matmul becomes; the float graph stays."""

    def __init__(
        self, model: ir.Model, form: Form, activations: Activations | None = None, *, feedback: bool = False
    ) -> None:
        """Smooth a copy of `model` for `form`, if there are `activations` of it.

        Args:
            model: the float graph.
            form: of every weight matmul, unless `build` is told otherwise.
            activations: of `model`, to choose scales on.
            feedback: round weights with error feedback over `activations`, which pays where these are what the model
                meets, and costs accuracy where they are not (docs/precision.md). Rows beside them bound that cost.

        Raises:
            ExportError: there is no weight matmul, a float operator other than a MatMul holds a weight, or the opset is
                below 21.
        """
        model = model.clone()
        self._activations = activations
        self._feedback = feedback
        self._smoothed: Mapping[str, Smoothed] = {} if activations is None else smooth(model, activations, form)
        super().__init__(model, form, "int8")

    def encode(self, name: str, weight: Float32, x: str, form: Form) -> Encoded:
        """Parts: `int8` (K, N), with the form's zero point, `scales` float32 (N,) and `column_sums` float32 (1, N), the
        scaled sums over K.

        Raises:
            ExportError: the weight is longer than the form's accumulator allows, or too large.
        """
        if weight.shape[0] > form.max_inner:
            raise ExportError(
                f"int8: weight {name!r} has {weight.shape[0]} rows; {form.name} products summed in int32 allow "
                f"{form.max_inner}"
            )
        rows, beside = self._rows(x), self._rows_beside(x)
        if self._feedback and rows is not None and len(rows):
            integers, scales = with_error_feedback(weight, form.levels, rows, beside)
        else:
            integers, scales = nearest(weight, form.levels)
        column_sums = _column_sums(integers, scales)
        if not np.isfinite(column_sums).all():
            raise ExportError(f"int8: weight {name!r} is too large: a column sum overflows float32")
        parts = {"int8": form.stored(integers), "scales": scales, "column_sums": column_sums}
        measured = [
            matmul_sqnr_db(spread(sample, _MEASURED_ROWS), weight, integers, scales)
            for sample in (rows, beside)
            if sample is not None and len(sample)
        ]
        return Encoded(parts, min(measured, default=None))

    def _describe(self, name: str, x: str, form: Form | None) -> WeightMatmul:
        smoothed = self._smoothed.get(x)
        described = super()._describe(name, x, form)
        if smoothed is None:
            return described
        return described.model_copy(update={"smoothing_alpha": smoothed.alpha, "smoothing_place": smoothed.place})

    def _rows(self, x: str) -> Float32 | None:
        return None if self._activations is None else self._smoothed_rows(x, self._activations.rows)

    def _rows_beside(self, x: str) -> Float32 | None:
        return None if self._activations is None else self._smoothed_rows(x, self._activations.rows_beside)

    def _smoothed_rows(self, x: str, rows_of: Callable[[str], Float32 | None]) -> Float32 | None:
        smoothed = self._smoothed.get(x)
        rows = rows_of(smoothed.source if smoothed else x)
        return rows / smoothed.scales if smoothed and rows is not None else rows


def quantize_int8(model: ir.Model, form: Form = EIGHT_BIT) -> ir.Model:
    """`model` with every weight matmul in `form`, without calibration; `model` stays as it is. See `Quantizer`."""
    return Quantizer(model, form).build()


def _column_sums(integers: Int32, scales: Float32) -> Float32:
    with np.errstate(over="ignore"):  # the caller looks
        sums: Float32 = (integers.sum(axis=0, keepdims=True) * scales.astype(np.float64)).astype(np.float32)
    return sums
