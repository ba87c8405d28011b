"""Float weights and activations -> integers and scales: arithmetic on arrays, no graph.

Weights go to the nearest level, or one row after another with the error of the rows before fed back (GPTQ, Frantar et
al. 2022, in the form of LDLQ, Chee et al. 2023): the output error over the calibration's tokens shrinks, not the
weights' own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from export.quantization.forms import STEPS
from export.relative_error import Float64, sqnr_db
from service.packing import Float32

Int32 = npt.NDArray[np.int32]

_TINY: Final = np.finfo(np.float32).tiny
# Of the second moment that errors are fed back over, taken from tokens beside the calibration's: fitted to these alone,
# weights are worse elsewhere than the nearest ones are (docs/precision.md).
BESIDE_SHARE: Final = 0.3
_DAMPING: Final = 0.01  # of the mean diagonal, GPTQ's own default: a factor exists where tokens span few directions
_BLOCK: Final = 64


def nearest(weight: Float32, levels: int) -> tuple[Int32, Float32]:
    """Round (K, N) to integers in [-levels, levels] and the scale of each column (N,)."""
    scales = column_scales(weight, levels)
    return np.clip(np.rint(weight / scales), -levels, levels).astype(np.int32), scales


def with_error_feedback(
    weight: Float32, levels: int, rows: Float32, beside: Float32 | None = None
) -> tuple[Int32, Float32]:
    """Round (K, N) as `nearest` does, minimising the error of `rows @ weight` for rows (n, K), n >= 1.

    H = rows^T rows = (U + I) D (U + I)^T with U strictly upper triangular; row k becomes
    nearest(w_k + sum_{j < k} U_jk (w_j - w'_j)), inputs of the largest energy first. Rows `beside` (m, K), where there
    are any, take `BESIDE_SHARE` of H, whatever their number and size.
    """
    scales = column_scales(weight, levels)
    moment = second_moment(rows)
    if beside is not None and len(beside):
        other = second_moment(beside)
        here, there = float(np.trace(moment)), float(np.trace(other))
        if here > 0 and there > 0:
            moment = (1 - BESIDE_SHARE) * moment + (BESIDE_SHARE * here / there) * other
    return feedback_rounded(weight, moment, scales, -levels, levels), scales


def second_moment(rows: Float32) -> Float64:
    """rows^T rows / n (K, K) of rows (n, K), n >= 1."""
    moment: Float64 = (rows.T @ rows).astype(np.float64) / len(rows)
    return moment


def feedback_rounded(
    weight: Float32, moment: Float64, scales: Float32, lowest: int | Int32, highest: int | Int32
) -> Int32:
    """The integers of `with_error_feedback` for a second moment (K, K) of the inputs, and for scales, and bounds of the
    integers, that broadcast to (K, N).
    """
    inner = len(weight)
    gram = moment.copy()
    gram[np.diag_indices(inner)] += max(_DAMPING * float(np.trace(gram)) / inner, float(_TINY))
    order = np.argsort(-np.diag(gram), kind="stable")
    reversed_factor = np.linalg.cholesky(gram[np.ix_(order, order)][::-1, ::-1])[::-1, ::-1]
    feedback = (reversed_factor / np.diag(reversed_factor)).astype(np.float32)
    step, low, high = (np.broadcast_to(array, weight.shape)[order] for array in (scales, lowest, highest))
    wanted = weight[order]
    integers = np.empty(weight.shape, np.int32)
    error = np.zeros_like(wanted)
    for start in range(0, inner, _BLOCK):
        end = min(start + _BLOCK, inner)
        carried = feedback[:start, start:end].T @ error[:start]
        for k in range(start, end):
            target = wanted[k] + carried[k - start] + feedback[start:k, k] @ error[start:k]
            rounded = np.clip(np.rint(target / step[k]), low[k], high[k])
            integers[order[k]] = rounded
            error[k] = wanted[k] - rounded * step[k]
    return integers


def column_scales(weight: Float32, levels: int) -> Float32:
    """What one level is worth in each column of (K, N): (N,), positive."""
    # A column of zeros has no range: any scale serves. Below the smallest normal float32 a scale would lose its digits.
    scales: Float32 = np.maximum(np.abs(weight).max(axis=0) / np.float32(levels), _TINY)
    return scales


def rounded_rows(rows: Float32) -> Float32:
    """What is left of rows (n, K) after the run-time rounding that `forms` states."""
    low = rows.min(axis=1, keepdims=True)
    scale = np.maximum((rows.max(axis=1, keepdims=True) - low) / np.float32(STEPS), _TINY)
    rounded: Float32 = np.rint((rows - low) / scale) * scale + low
    return rounded


def matmul_sqnr_db(rows: Float32, weight: Float32, integers: Int32, scales: Float32) -> float:
    """SQNR of the integer matmul against `rows @ weight`, all finite, over all rows together."""
    exact = rows @ weight
    power = float(np.linalg.norm(exact))
    if power == 0:
        return sqnr_db(0.0)
    error = rounded_rows(rows) @ (integers * scales) - exact
    return sqnr_db(float(np.linalg.norm(error)) / power)
