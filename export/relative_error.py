"""How far outputs are from their reference, as one number. Pure numpy: measured at export and again by verify."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from service.packing import Float32

Float64 = npt.NDArray[np.float64]

# Equal bits have no finite ratio; 1e-15 is below what float32 outputs can show.
_SMALLEST: Final = 1e-15


def relative_error(out: Float32, reference: Float64) -> float:
    """||out - reference|| / ||reference|| over all rows; where the reference is zero, 0 if `out` is too, else inf."""
    noise = float(np.linalg.norm(out.astype(np.float64) - reference))
    signal = float(np.linalg.norm(reference))
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return noise / signal


def sqnr_db(error: float) -> float:
    """Signal to quantization noise in dB of a relative error: -20 log10, at most 300."""
    return -20 * math.log10(max(error, _SMALLEST))
